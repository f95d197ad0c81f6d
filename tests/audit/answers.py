"""Answers made by hand."""

from vllm_invariant.audit.answers import Answer

LOGPROBS = ({7: -0.5, 9: -1.25}, {8: -0.25})


def answer(tokens=(7, 8), logprobs=LOGPROBS, cached=0, sent=0.0, first=1.0, last=2.0):
    return Answer(tuple(tokens), tuple(logprobs), cached, sent, first, last)
