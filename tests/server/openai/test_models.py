def test_the_list(client):
    first, second = client.models.list().data
    assert (first.id, second.id) == ("small", "org/small")
    for model in (first, second):
        assert (model.object, model.owned_by, model.created) == ("model", "xjax", 1_700_000_000)
        assert (model.root, model.parent, model.max_model_len) == ("small", None, 4096)


def test_one_name(client):
    for name in ("small", "org/small"):
        assert client.models.retrieve(name).id == name
