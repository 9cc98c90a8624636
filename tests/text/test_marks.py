from tokenizers import AddedToken

from xjax.text.marks import Mark, Marks


def make(*contents: str, **flags: bool) -> Marks:
    return Marks({i: AddedToken(content, **flags) for i, content in enumerate(contents)})


def test_the_longest_token_from_the_left():
    marks = make("<s", "<s>", "s>x")
    assert list(marks.find("a<s>x<s s>x")) == [Mark(1, 4, 1), Mark(5, 7, 0), Mark(8, 11, 2)]


def test_space_taken_along():
    assert list(make("<s>", lstrip=True).find("a \n<s> b")) == [Mark(1, 6, 0)]
    assert list(make("<s>", rstrip=True).find("a <s> \nb")) == [Mark(2, 7, 0)]
    assert list(make("<s>", lstrip=True, rstrip=True).find("<s> <s>")) == [Mark(0, 4, 0), Mark(4, 7, 0)]


def test_whole_words():
    marks = make("end", single_word=True)
    assert list(marks.find("ending bend end_ end.")) == [Mark(17, 20, 0)]


def test_none():
    assert list(make().find("<s>")) == [] and not make().occurs_in("x") and not make().starts("x")


def test_at_the_start():
    marks = make("ab")
    assert marks.starts("abc") and not marks.starts("cab") and not marks.starts("") and marks.occurs_in("cab")
