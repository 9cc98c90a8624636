"""Replies of both forms brought into one, so that a stream can be compared with a reply."""


def whole_chat(reply):
    """A reply that was not streamed: by index (text, finish_reason, stop_reason, logprobs), and usage."""
    choices = {
        c.index: (
            c.message.content,
            c.finish_reason,
            c.stop_reason,
            None if c.logprobs is None else [entry.to_dict() for entry in c.logprobs.content],
        )
        for c in reply.choices
    }
    return choices, reply.usage.to_dict()


def folded_chat(stream):
    """The same of a stream's chunks."""
    texts, ends, logprobs, usage, roles = {}, {}, {}, None, []
    for chunk in stream:
        usage = chunk.usage or usage
        for c in chunk.choices:
            assert c.index not in ends, "nothing may follow a finish_reason"
            if c.delta.role:
                assert c.index not in texts and c.delta.content == ""
                roles.append(c.index)
            texts[c.index] = texts.get(c.index, "") + (c.delta.content or "")
            if c.logprobs is not None:
                logprobs.setdefault(c.index, []).extend(entry.to_dict() for entry in c.logprobs.content)
            if c.finish_reason is not None:
                assert c.delta.content is None
                ends[c.index] = (c.finish_reason, c.stop_reason)
    assert sorted(roles) == sorted(texts)
    choices = {i: (texts[i], *ends[i], logprobs.get(i)) for i in texts}
    return choices, None if usage is None else usage.to_dict()


_COLUMNS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


def whole_text(reply):
    """As `whole_chat`, for completions."""
    choices = {
        c.index: (
            c.text,
            c.finish_reason,
            c.stop_reason,
            None if c.logprobs is None else {name: getattr(c.logprobs, name) for name in _COLUMNS},
        )
        for c in reply.choices
    }
    return choices, reply.usage.to_dict()


def folded_text(stream):
    """As `folded_chat`, for completions."""
    texts, ends, logprobs, usage = {}, {}, {}, None
    for chunk in stream:
        usage = chunk.usage or usage
        for c in chunk.choices:
            assert c.index not in ends, "nothing may follow a finish_reason"
            texts[c.index] = texts.get(c.index, "") + c.text
            if c.logprobs is not None:
                columns = logprobs.setdefault(c.index, {name: [] for name in _COLUMNS})
                for name in _COLUMNS:
                    columns[name] += getattr(c.logprobs, name)
            if c.finish_reason is not None:
                ends[c.index] = (c.finish_reason, c.stop_reason)
    choices = {i: (texts[i], *ends[i], logprobs.get(i)) for i in texts}
    return choices, None if usage is None else usage.to_dict()
