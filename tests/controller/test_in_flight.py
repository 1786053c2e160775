"""The account of what was sent always equals what a recount of the same events says."""

from hypothesis import given
from hypothesis import strategies as st

from app.controller.in_flight import InFlight

EVENTS = st.lists(
    st.tuples(st.sampled_from(["send", "first", "end"]), st.integers(0, 5), st.integers(0, 50), st.integers(1, 50)),
    max_size=60,
)


@given(EVENTS)
def test_sums_equal_a_recount(events):
    account, sent, first = InFlight(), {}, set()
    for at_s, (what, number, prompt_tokens, output_tokens) in enumerate(events):
        key = str(number)
        if what == "send" and key not in sent:
            account.send(key, prompt_tokens, output_tokens, f"tenant {number % 2}")
            sent[key] = (prompt_tokens, output_tokens)
        elif what == "first":
            account.first_token(key, at_s)
            first |= {key} & sent.keys()
        elif what == "end":
            account.end(key, at_s)
            sent.pop(key, None)
            first.discard(key)
    assert len(account) == len(sent)
    assert account.held_by("tenant 0") == sum(int(key) % 2 == 0 for key in sent)
    assert account.held_by("none") == 0
    assert account.pending_prefill_tokens == sum(sent[key][0] for key in sent.keys() - first)
    assert account.pending_output_tokens(100.0, None) == sum(output for _, output in sent.values())


def test_what_is_produced_meanwhile_is_no_longer_pending():
    account = InFlight()
    account.send("a", 10, 100)
    assert account.pending_output_tokens(5.0, 20.0) == 100
    account.first_token("a", 5.0)
    assert account.pending_output_tokens(6.0, 20.0) == 50
    assert account.pending_output_tokens(600.0, 20.0) == 1


def test_the_rate_is_of_what_was_completed_lately():
    account = InFlight()
    assert account.completions_per_s(0.0) is None
    for number in range(4):
        account.send(str(number), 1, 1)
        account.end(str(number), float(number))
    assert account.completions_per_s(4.0) == 1.0
    assert account.completions_per_s(100.0) is None
