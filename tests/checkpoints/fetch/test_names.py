"""Names of models, and which files of a repository belong to one."""

import pytest

from xjax.checkpoints.fetch.names import HubName, check_revision, parse_hub_name, select_files
from xjax.errors import LoadError


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("user/repo", HubName("user/repo")),
        ("User-1/Repo_2.5-GGUF", HubName("User-1/Repo_2.5-GGUF")),
        ("user/repo:Q4_K_M", HubName("user/repo", tag="Q4_K_M")),
        ("user/repo/file.gguf", HubName("user/repo", file="file.gguf")),
        ("user/repo/sub/file.gguf", HubName("user/repo", file="sub/file.gguf")),
    ],
)
def test_names(name: str, expected: HubName) -> None:
    assert parse_hub_name(name) == expected
    assert str(expected) == name


@pytest.mark.parametrize(
    "name",
    [
        "repo", "", "/", "user/", "/repo", "user//repo", "user/..", "../repo", "user/../repo", "./repo",
        "user/repo/../../x.gguf", "user/repo/file.bin", "user/repo/", "user/repo:", "user/repo:a:b",
        "user/repo/f.gguf:Q4_0", "user/repo:../x", "user/re po", "user/re\npo", "us\0er/repo", "user/repo\\x",
        "~/repo", "-user/repo", "user/.hidden", "http://host/user/repo", "user/" + "x" * 300, "üser/repo",
    ],
)  # fmt: skip
def test_what_is_no_name(name: str) -> None:
    with pytest.raises(LoadError):
        parse_hub_name(name)


def test_revisions() -> None:
    for good in (None, "main", "v1.0", "refs/pr/3", "a" * 40):
        check_revision(good)
    for bad in ("", "../main", "/main", "-x", "a b", "a\0", "refs/../x"):
        with pytest.raises(LoadError, match="not the name of a branch"):
            check_revision(bad)


HF_FILES = [
    ".gitattributes", "README.md", "config.json", "generation_config.json", "tokenizer.json",
    "tokenizer_config.json", "tokenizer.model", "chat_template.jinja", "special_tokens_map.json",
    "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json",
    "pytorch_model.bin", "original/consolidated.00.pth", "consolidated.safetensors", "onnx/model.onnx",
    "training_args.bin", "adapter.pth", "evil.py",
]  # fmt: skip


def test_a_safetensors_model_comes_with_config_tokenizer_and_template() -> None:
    assert select_files(HubName("u/r"), HF_FILES) == [
        "chat_template.jinja", "config.json", "generation_config.json", "special_tokens_map.json",
        "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "model.safetensors.index.json",
        "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors",
    ]  # fmt: skip


GGUF_FILES = [
    "README.md", "config.json", "m-Q4_0.gguf", "m-Q4_K_M.gguf", "m-Q4_K_S.gguf", "m-Q8_0.gguf",
    "m.imatrix.gguf", "mmproj-m-Q4_K_M.gguf", "BF16/m-BF16-00001-of-00002.gguf",
    "BF16/m-BF16-00002-of-00002.gguf", "m-Q6_K-00001-of-00002.gguf",
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("u/r", ["m-Q4_K_M.gguf"]),
        ("u/r:Q4_0", ["m-Q4_0.gguf"]),
        ("u/r:q4_k_s", ["m-Q4_K_S.gguf"]),
        ("u/r:BF16", ["BF16/m-BF16-00001-of-00002.gguf", "BF16/m-BF16-00002-of-00002.gguf"]),
        ("u/r/m-Q8_0.gguf", ["m-Q8_0.gguf"]),
        (
            "u/r/BF16/m-BF16-00002-of-00002.gguf",
            ["BF16/m-BF16-00001-of-00002.gguf", "BF16/m-BF16-00002-of-00002.gguf"],
        ),
    ],
)
def test_gguf_files(name: str, expected: list[str]) -> None:
    assert select_files(parse_hub_name(name), GGUF_FILES) == expected


@pytest.mark.parametrize(
    ("name", "files", "message"),
    [
        ("u/r:Q2_K", GGUF_FILES, "no GGUF file for Q2_K; it has .*m-Q4_0.gguf"),
        ("u/r:Q6_K", GGUF_FILES, "m-Q6_K-00002-of-00002.gguf of the model is missing"),
        ("u/r/none.gguf", GGUF_FILES, "has no such file"),
        ("u/r:Q4_0", HF_FILES, "has no GGUF files"),
        ("u/r", ["pytorch_model.bin", "config.json"], "neither config.json with safetensors"),
        ("u/r", ["model.safetensors"], "neither config.json with safetensors"),
        ("u/r", ["a-Q2_K.gguf", "a-Q3_K.gguf"], "name one as user/repo:TAG; it has a-Q2_K.gguf, a-Q3_K.gguf"),
        ("u/r", ["../a.gguf", "/b.gguf"], "neither"),
        ("u/r", [], "neither"),
    ],
)
def test_nothing_to_choose(name: str, files: list[str], message: str) -> None:
    with pytest.raises(LoadError, match=message):
        select_files(parse_hub_name(name), files)
