import pytest

from app.routing.mode_info import ModeInfo
from app.routing.profile import QualityEvidence
from app.routing.tags import tag_of
from loadgen.answer_fidelity import Wanted, Written, divergence, wanted_answers
from loadgen.calibration_gate import Gate, evidence_of, lossy_engines, reference_of, texts_to_read
from loadgen.client import OpenAIClient
from loadgen.fidelity import TextFidelity, stdlib_texts
from loadgen.quality_gate import GENERATED_KL, KL, Divergence, Limits
from loadgen.served_modes import read_served
from tests.loadgen.caching_modes import RIGHT, WRONG, CachingApplication, client_of


async def judged(application: CachingApplication) -> tuple[dict[tuple[str, str], QualityEvidence], str | None]:
    overview = application.overview()
    gate = Gate(lossy_engines(read_served(overview, None, None).modes, ()), wanted_answers(overview))
    async with client_of(application) as client:
        assert await gate.prepare(client, "m", "fp16") is None
        assert await gate.read(client, "m", "fp16", texts_to_read(20, 0), 60.0) is None
        why = await gate.answer(client, "m", "fp16", 60.0)
    return {(one.mode, one.metric): one for one in gate.evidence()}, why


async def test_a_combination_that_breaks_on_a_cache_hit_does_not_pass_on_its_parts() -> None:
    found, why = await judged(CachingApplication(corrupts=frozenset({"int8_prefix_caching"})))
    assert why is None
    assert found["int8", KL].outcome == found["int8_batched", KL].outcome == "pass"
    assert found["int8_prefix_caching", KL].outcome == "pass", "no text is read from a cache"
    assert found["int8_prefix_caching", GENERATED_KL].outcome == "fail"
    assert found["fp8_kv", GENERATED_KL].outcome == "pass"
    assert ("int8", GENERATED_KL) not in found


async def test_a_combination_passes_by_answers_from_its_cache() -> None:
    application = CachingApplication()
    found, why = await judged(application)
    answers = found["int8_prefix_caching", GENERATED_KL]
    assert (why, answers.outcome, answers.samples) == (None, "pass", Limits().bootstrap_samples_min)
    assert application.asked.count("int8_prefix_caching") == 2 * application.asked.count("fp8_kv") == 40


async def test_a_server_that_gives_fewer_tokens_is_judged_by_those_and_told_of() -> None:
    application = CachingApplication(max_logprobs=20)
    overview = application.overview()
    gate = Gate(lossy_engines(read_served(overview, None, None).modes, ()), wanted_answers(overview))
    async with client_of(application) as client:
        why = await gate.prepare(client, "m", "fp16")
        assert await gate.read(client, "m", "fp16", texts_to_read(20, 0), 60.0) is None
        assert await gate.answer(client, "m", "fp16", 60.0) is None
    assert "only 20 log-probabilities" in str(why)
    assert gate.top_tokens == 20
    assert {one.outcome for one in gate.evidence()} == {"pass"}


async def test_a_gate_that_cannot_ask_says_so() -> None:
    async with OpenAIClient("http://127.0.0.1:9") as client:
        assert "127.0.0.1:9" in str(await Gate({"int8": ["int8"]}).prepare(client, "m", "fp16"))


async def test_a_kv_cache_that_loses_only_while_generating_does_not_pass() -> None:
    found, _ = await judged(CachingApplication(strays=frozenset({"fp8_kv"})))
    assert (found["fp8_kv", KL].outcome, found["fp8_kv", GENERATED_KL].outcome) == ("pass", "fail")


async def test_speculation_that_strays_only_while_generating_does_not_pass() -> None:
    found, why = await judged(CachingApplication(strays=frozenset({"int8_speculative"})))
    assert why is None
    assert found["int8_speculative", KL].outcome == "pass", "no draft runs while a text is read"
    assert found["int8_speculative", GENERATED_KL].outcome == "fail"
    sound, _ = await judged(CachingApplication())
    assert sound["int8_speculative", GENERATED_KL].outcome == "pass"


async def test_answers_without_a_draft_are_no_evidence_of_speculation() -> None:
    found, why = await judged(CachingApplication(drafts=0))
    assert "int8_speculative drafted nothing" in str(why)
    assert found["int8_speculative", GENERATED_KL].outcome == "insufficient_evidence"


async def test_answers_that_did_not_come_from_the_cache_are_no_evidence() -> None:
    found, why = await judged(CachingApplication(caches=False))
    assert why is not None
    assert "from its cache" in why
    assert found["int8_prefix_caching", GENERATED_KL].outcome == "insufficient_evidence"
    assert found["fp8_kv", GENERATED_KL].outcome == "pass", "what comes after it is judged all the same"


async def test_what_fails_by_its_texts_costs_no_answers() -> None:
    application = CachingApplication()
    gate = Gate({"int8": ["int8_prefix_caching"]}, wanted_answers(application.overview()), ["none"] * 24)
    gate.texts = [TextFidelity("int8", text, 300, 0.2, 0.99, 0.0, 0.0, 1.0) for text in range(24)]
    assert gate.to_answer == {}
    assert [one.outcome for one in gate.evidence()] == ["fail"]


async def test_no_time_leaves_what_was_read() -> None:
    gate = Gate({"int8": ["int8"]})
    async with client_of(CachingApplication()) as client:
        assert "no time for all of its texts" in str(await gate.read(client, "m", "fp16", texts_to_read(400, 0), 0.05))
    assert len(gate.texts) < 400


def test_one_mode_of_each_lossy_engine_is_asked_unless_it_was_judged() -> None:
    modes = [
        ModeInfo("fast", "fp16", "fp16", lossless=True, speculative=True),
        ModeInfo("plain", "fp16", "fp16", lossless=True),
        ModeInfo("int8", "int8", "int8", lossless=False),
        ModeInfo("int8_more", "int8", "int8", lossless=False),
        ModeInfo("gptq", "gptq", "gptq", lossless=False),
    ]
    assert lossy_engines(modes, {"gptq"}) == {"int8": ["int8", "int8_more"]}
    assert (reference_of(modes, "fp16"), reference_of(modes[:1], "fp16")) == ("plain", None)
    texts = [TextFidelity("int8", text, 300, 0.001, 0.99, 0.0, 0.0, 1.0) for text in range(24)]
    found = evidence_of(texts, lossy_engines(modes, ()), ["none"] * 24)
    assert [(one.mode, one.outcome) for one in found] == [("int8", "pass"), ("int8_more", "pass")]


def test_wanted_answers_are_of_modes_that_reuse_or_draft_or_store_otherwise() -> None:
    found = wanted_answers(CachingApplication().overview())
    assert found == {
        "int8_prefix_caching": Wanted("int8", True, None),
        "fp8_kv": Wanted("fp8_kv", False, "fp8"),
        "int8_speculative": Wanted("int8_speculative", False, None, speculates=True),
    }
    row = {"id": "a", "engine": "e", "state": "ready"}
    told = {"data": [row], "engines": [{"name": "e", "engine_args": {"kv_cache_dtype": "fp8_e5m2"}}]}
    assert wanted_answers(told) == {"a": Wanted("e", False, "fp8_e5m2")}
    # A draft model shows in the engine's settings as well, and so does that there is none.
    for config, speculates in (({"model": "small"}, True), (None, False)):
        args = {"kv_cache_dtype": "auto", "speculative_config": config}
        found = wanted_answers({"data": [row], "engines": [{"name": "e", "engine_args": args}]})
        assert found == ({"a": Wanted("e", False, None, speculates=True)} if speculates else {})
    assert wanted_answers({"data": [row | {"state": "starting"}]}) == {}
    # Nobody judges a lossless mode unasked; who does wants to see what it writes.
    assert wanted_answers({"data": [row | {"lossless": True, "prefix_reuse": True}]}) == {"a": Wanted("e", True, None)}


def test_answers_are_compared_until_they_differ() -> None:
    reference = Written(9, ("a", "b", "c"), (RIGHT, RIGHT, RIGHT))
    assert divergence(reference, reference).kl_nats == pytest.approx(0, abs=1e-6)
    parted = divergence(reference, Written(9, ("a", "x", "y"), (RIGHT, WRONG, RIGHT)))
    at_once = divergence(reference, Written(9, ("x", "b", "c"), (WRONG, RIGHT, RIGHT)))
    assert parted.kl_nats == pytest.approx(at_once.kl_nats / 2)
    assert at_once.covered > 0.9


@pytest.mark.parametrize(("kl_nats", "outcome"), [(0.023, "pass"), (0.06, "fail"), (0.05, "insufficient_evidence")])
def test_a_quick_calibration_reads_enough_to_judge(kl_nats: float, outcome: str) -> None:
    texts = stdlib_texts(Limits().bootstrap_samples_min)
    assert len(texts) == Limits().bootstrap_samples_min
    # Two cores read some 110 tokens, or 450 characters, a second: three modes within a quarter of nine minutes.
    assert 3 * sum(map(len, texts)) / 450 < 0.25 * 540
    noise = [0.004 * (-1) ** index for index in range(len(texts))]
    read = [TextFidelity("int8", n, 120, kl_nats + more, 0.95, 0.0, 0.0, 1.0) for n, more in enumerate(noise)]
    (found,) = evidence_of(read, {"int8": ["int8"]}, ["none"] * len(texts))
    assert found.outcome == outcome


def test_a_full_calibration_judges_tags_apart() -> None:
    """What strays on code only fails there, and a mode's own answers count wherever its texts pass."""
    texts = texts_to_read(20, 20)
    scopes = [text.scope for text in texts]
    assert {scope: scopes.count(scope) for scope in scopes} == {"none": 20, "rewriting": 20, "code": 20}
    tagged = [text for text in texts if text.scope != "none"]
    assert [tag_of(text.text).tag.value for text in tagged] == [text.scope for text in tagged]
    engines = {"int8": ["int8", "int8_prefix_caching"]}
    gate = Gate(engines, {"int8_prefix_caching": Wanted("int8", True, None)}, scopes)
    gate.texts = [
        TextFidelity("int8", n, 120, 0.2 if scope == "code" else 0.01, 0.9, 0.0, 0.0, 1.0)
        for n, scope in enumerate(scopes)
    ]
    gate.answers = {"int8_prefix_caching": [Divergence(0.01, 0.9)] * 20}
    found = {(one.mode, one.scope, one.metric): one.outcome.value for one in gate.evidence()}
    for mode in engines["int8"]:
        assert [found[mode, scope, KL] for scope in ("none", "rewriting", "code")] == ["pass", "pass", "fail"]
    assert found["int8_prefix_caching", "rewriting", GENERATED_KL] == "pass"
    assert not any(mode == "int8" and metric == GENERATED_KL for mode, _, metric in found)
