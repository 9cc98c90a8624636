"""From logits to tokens: pure functions over one step's J sampled positions.

    logits -> penalties.apply -> mask.apply -> candidates.from_logits -> sample.choose
       `-------------------------------------------------> logprobs.measure

`sample.sample` is that path. The law of this folder: a row's token is a function of its own
logits, parameters, seed, sample id and position. It does not depend on J, on the other rows,
or on what they make the step compute. Work over V is therefore done a row at a time, only for
the rows that need it, by a loop whose body is the same program whatever J is; what is done for
all rows at once is elementwise or exact.

The order of tokens is everywhere: larger logit first, of equal ones the lower id first.
"""
