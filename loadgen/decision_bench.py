"""`decision-bench`: what a routing decision costs, part by part, and what the prefix index costs at size.

Nothing is served; all parts are the ones the controller calls. Tokenising is measured apart, since it is the
client's prompt that decides it.
"""

from __future__ import annotations

import json as json_format
import random
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from app.controller.trained_model import OnnxPredictor
    from app.routing.features import RequestFeatures
    from app.routing.policies import Policy
    from app.routing.prefix_index import PrefixIndex, PromptChain
    from app.routing.snapshot import Snapshot

PROMPT_TOKENS = 1_000
CHARS_PER_TOKEN = 4.5
MANY_PREFIXES = 1_000_000
FEW_PREFIXES = 1_000
_WARM_UP = 500
_ENGINES = ("fp16", "int8", "gptq", "speculative")


def register(app: typer.Typer) -> None:
    """Add the command to the program."""
    app.command("decision-bench")(decision_bench)


def decision_bench(
    json: Annotated[bool, typer.Option("--json", help="One JSON object instead of a table.")] = False,
    repeats: Annotated[int, typer.Option(help="Calls per figure.", min=10)] = 5_000,
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="A tokenizer.json to time apart from the rest; the embedded model's once it is prepared."),
    ] = None,
    trained_model: Annotated[
        Path | None, typer.Option(help="Trained model (ONNX) of the policy learned; a small one of its own otherwise.")
    ] = None,
) -> None:
    """Percentiles of features, prefix lookup and every policy for a 1,000-token prompt, in microseconds."""
    try:
        results = measure_all(repeats, tokenizer or _embedded_tokenizer(), trained_model)
    except (OSError, ValueError) as error:  # files that are not there, or not what they are given for
        typer.echo(f"decision-bench: {error}", err=True)
        raise typer.Exit(2) from error
    if json:
        typer.echo(json_format.dumps(results, indent=1))
        return
    for name, figures in results.items():
        typer.echo(f"{name:32s} " + "  ".join(f"{key} {value:,.4g}" for key, value in figures.items()))


def _embedded_tokenizer() -> Path | None:
    """The embedded model's tokenizer; None before `prepare` has made it."""
    from app.engines.checkpoints import embedded
    from app.engines.store import Scheme, checkpoint_folder, default_home

    path = checkpoint_folder(embedded.REFERENCE, Scheme.FP16, default_home()) / "tokenizer.json"
    return path if path.is_file() else None


def measure_all(
    repeats: int, tokenizer: Path | None = None, trained_model: Path | None = None
) -> dict[str, dict[str, float]]:
    """All figures by name: `*_us` are microseconds, percentiles over `repeats` calls.

    Raises:
        OSError, ValueError: the tokenizer or the trained model cannot be used.
    """
    encode = None if tokenizer is None else _read_tokenizer(tokenizer)
    # Machines differ, and a busy one is slower: the same loop everywhere says what a microsecond is worth here.
    results = {"reference_loop": percentiles(lambda n: sum(range(1000)), repeats)}
    results |= _decisions(repeats, _predictor(trained_model))
    results["prefix_index"] = _index_at_size(repeats)
    if encode is not None:
        prompts = _prompts(64)
        results["tokenising"] = percentiles(lambda n: encode(prompts[n % 64]), min(repeats, 500))
    return results


def _predictor(trained_model: Path | None) -> OnnxPredictor | None:
    """The trained model that was given, or a small one; None where what makes one is not installed."""
    from app.controller.trained_model import OnnxPredictor

    if trained_model is not None:
        return OnnxPredictor(trained_model)
    try:
        with tempfile.TemporaryDirectory() as folder:
            return OnnxPredictor(write_example_model(Path(folder) / "example.onnx"))
    except ModuleNotFoundError as error:
        typer.echo(f"decision-bench: without policy.learned, {error}; give --trained-model FILE", err=True)
        return None


def write_example_model(path: Path, version: str = "example", model: str = "bench", hardware: str = "bench") -> Path:
    """Writes a decision tree of the size that `train` makes, over modes that each are the best for some requests.

    Raises OSError.
    """
    from app.routing.tags import Tag
    from loadgen.best_mode import Constraints, Measured
    from loadgen.learners import export, fit
    from loadgen.training_data import Dataset, Example, paper_features

    rng = random.Random(3)
    examples = []
    for number in range(300):
        prompt, output, tag = rng.randint(16, 4_000), rng.randint(1, 512), rng.choice(list(Tag))
        costs = {"fp16": (1, 40), "int8": (1.2, 30), "gptq": (2, 20), "speculative": (1.1, 10 + 5 * len(tag.value))}
        measured = {mode: Measured(read * prompt + step * output) for mode, (read, step) in costs.items()}
        examples.append(Example(str(number), paper_features(prompt, output, tag), measured))
    data = Dataset(examples, "fp16")
    fitted = fit("tree", data, data.features(), Constraints())
    path.write_bytes(export(fitted, version=version, model=model, hardware=hardware))
    return path


def percentiles(calls: Callable[[Any], object], repeats: int, prepare: Callable[[int], Any] = int) -> dict[str, float]:
    """Time `calls(prepare(0..repeats-1))` one by one, without `prepare`; p50, p95 and p99 in microseconds."""
    for number in range(_WARM_UP):
        calls(prepare(number))
    clock = time.perf_counter_ns
    taken = []
    for number in range(repeats):
        given = prepare(number)
        began = clock()
        calls(given)
        taken.append(clock() - began)
    taken.sort()
    return {f"p{share}_us": taken[min(repeats - 1, repeats * share // 100)] / 1000 for share in (50, 95, 99)}


def _prompts(count: int, seed: int = 0) -> list[str]:
    """Prompts of about 1,000 tokens; the first half of their text is shared by groups of eight."""
    rng = random.Random(seed)
    words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 9))) for _ in range(2_000)]
    length = int(PROMPT_TOKENS * CHARS_PER_TOKEN)

    def text(chars: int) -> str:
        return " ".join(rng.choices(words, k=chars // 4))[:chars]

    shared = [text(length // 2) for _ in range(max(1, count // 8))]
    return [shared[number % len(shared)] + text(length - length // 2) for number in range(count)]


def _decisions(repeats: int, trained: OnnxPredictor | None) -> dict[str, dict[str, float]]:
    from app.routing.features import measure
    from app.routing.output_length import OutputLengthPredictor
    from app.routing.policies import make_policy
    from app.routing.prefix_index import PrefixIndex, text_chain
    from app.routing.settings import RoutingSettings
    from app.routing.snapshot import EngineView, Snapshot

    modes = _modes()
    settings = RoutingSettings()
    profile = _profile()
    rng = random.Random(1)
    drawn = [
        {name: (rng.choice((0, 0, 1, 2, 6)), rng.random() * 0.9, rng.choice((0, 500))) for name in _ENGINES}
        for _ in range(61)
    ]

    def live(number: int) -> Snapshot:
        """Made for every request, as in the controller: what a decision reads was written just before."""
        return Snapshot(
            mean_prompt_tokens=300.0,
            mean_output_tokens=100.0,
            engines={
                name: EngineView(
                    engine=name,
                    in_flight=load,
                    running=load,
                    kv_use=kv_use,
                    pending_output_tokens=load * 60,
                    pending_prefill_tokens=prefill if load else 0,
                    step_ms=20.0,
                    kv_capacity_tokens=40_000,
                )
                for name, (load, kv_use, prefill) in drawn[number % 61].items()
            },
            corrections={"speculative:rewriting": 0.7, "gptq": 1.1},
        )

    predictor = OutputLengthPredictor()
    index = PrefixIndex()
    for engine in _ENGINES:
        index.follow(engine, 1, 200_000)
    prompts = _prompts(64)
    for number, prompt in enumerate(prompts):
        index.record(text_chain(prompt), PROMPT_TOKENS, _ENGINES[number % 4])
    chains = [text_chain(prompt) for prompt in prompts]

    def features(number: int, snapshot: Snapshot) -> RequestFeatures:
        prompt = prompts[number % 64]
        chain = text_chain(prompt)
        return measure(
            text=prompt,
            prompt_tokens=PROMPT_TOKENS,
            snapshot=snapshot,
            predictor=predictor,
            settings=settings,
            max_tokens=256,
            seen_tokens=index.seen_tokens(chain, PROMPT_TOKENS),
            cached_tokens=index.cached_tokens(chain, PROMPT_TOKENS),
        )

    def arrival(number: int) -> tuple[int, Snapshot]:
        return number, live(number)

    def measured(number: int) -> tuple[RequestFeatures, Snapshot]:
        snapshot = live(number)
        return features(number, snapshot), snapshot

    def decisions(policy: Policy) -> dict[str, float]:
        return percentiles(lambda given: policy.decide(*given), repeats, measured)

    def features_and_decisions(policy: Policy) -> dict[str, float]:
        return percentiles(lambda given: policy.decide(features(*given), given[1]), repeats, arrival)

    for request, _ in map(measured, range(64)):
        for length in (20, 60, 130):
            predictor.observe(request.tag, request.prompt_shape, 256, length, 0.0)
    results = {
        "snapshot": percentiles(live, repeats),
        "features": percentiles(lambda given: features(*given), repeats, arrival),
        "features.prefix_chain": percentiles(lambda n: text_chain(prompts[n % 64]), repeats),
        "features.prefix_lookup": _lookups(index, chains, repeats),
    }
    served = {} if trained is None else {"model": trained.model, "hardware": trained.hardware}
    for name in ("rules", "rules_published", "cost", "learned", "static:fp16"):
        if name == "learned" and trained is None:
            continue
        policy = make_policy(name, modes, settings, profile, trained, **served)
        results[f"policy.{name}"] = decisions(policy)
        if name in ("cost", "learned"):
            results[f"features+{name}"] = features_and_decisions(policy)
    request, snapshot = measured(0)
    record = make_policy("cost", modes, settings, profile).decide(request, snapshot)
    records = (request, snapshot, record)
    results["records_to_json"] = percentiles(lambda _: [kept.to_json() for kept in records], repeats)
    return results


def _lookups(index: PrefixIndex, chains: list[PromptChain], repeats: int) -> dict[str, float]:
    """Every chain is copied before the clock starts, since the controller has just made the one that it looks up."""

    def fresh(number: int) -> PromptChain:
        chain = chains[number % len(chains)]
        return chain._replace(hashes=[value ^ 0 for value in chain.hashes])

    return percentiles(lambda chain: index.cached_tokens(chain, PROMPT_TOKENS), repeats, fresh)


def _modes() -> list[Any]:
    from app.routing.mode_info import ModeInfo

    return [
        ModeInfo("fp16", "fp16", "fp16", True),
        ModeInfo("prefix_caching", "fp16", "fp16", True, prefix_reuse=True),
        ModeInfo("int8", "int8", "int8", False),
        ModeInfo("int8_continuous_batching", "int8", "int8", False),
        ModeInfo("gptq", "gptq", "gptq", False),
        ModeInfo("gptq_prefix_caching", "gptq", "gptq", False, prefix_reuse=True),
        ModeInfo("speculative", "speculative", "fp16", True, speculative=True),
    ]


def _profile() -> Any:
    """Plausible coefficients: only the amount of work matters here."""
    from app.routing.profile import parse_profile

    def mode(prefill: float, step: float) -> dict[str, Any]:
        return {
            "prefill_ms": [[16, 20.0], [1024, 1000 * prefill], [2048, 2100 * prefill]],
            "step_ms": [[1, step], [4, step * 1.1], [16, step * 1.6]],
            "prefill_j": [[16, 1.0], [2048, 60.0]],
            "decode_j_per_token": [[1, 3.0], [16, 0.6]],
        }

    modes = _modes()
    return parse_profile(
        {
            "schema_version": 1,
            "version": "bench",
            "model": "bench",
            "hardware": "bench",
            "modes": {info.name: mode(1.0 if info.weights != "gptq" else 2.0, 40.0) for info in modes},
            "interference": {one: {two: 1.5 for two in _ENGINES if two != one} for one in _ENGINES},
            "quality": [
                {"mode": info.name, "scope": "any", "outcome": "pass", "metric": "kl"}
                for info in modes
                if not info.lossless
            ],
        },
        model="bench",
        hardware="bench",
    )


def _index_at_size(repeats: int) -> dict[str, float]:
    """Memory of an index of a million prefixes, and a lookup's time there and with a thousand."""
    from app.routing.prefix_index import PrefixIndex

    rng = random.Random(2)
    tracemalloc.start()
    many = PrefixIndex(2 * MANY_PREFIXES)
    _fill(many, rng, MANY_PREFIXES)
    used_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    few = PrefixIndex(2 * MANY_PREFIXES)
    _fill(few, rng, FEW_PREFIXES)
    figures = {"prefixes": float(MANY_PREFIXES), "megabytes": used_bytes / 1e6}
    # Filling again from the same seeds makes equal chains of other objects, as a later request would.
    for name, index, prefixes in (("few", few, FEW_PREFIXES), ("many", many, MANY_PREFIXES)):
        chains = _fill(None, random.Random(2) if name == "many" else _after(MANY_PREFIXES), prefixes)
        rng.shuffle(chains)
        times = _lookups(index, chains, repeats)
        figures |= {f"lookup_{name}_{share}": value for share, value in times.items()}
    figures["many_to_few"] = figures["lookup_many_p50_us"] / figures["lookup_few_p50_us"]
    return figures


def _fill(index: PrefixIndex | None, rng: random.Random, prefixes: int) -> list[PromptChain]:
    """Record prompts of 1,000 tokens until the engine's index holds `prefixes`; their chains, at most 20,000."""
    from app.routing.prefix_index import text_chain

    pattern = text_chain("x" * int(PROMPT_TOKENS * CHARS_PER_TOKEN))
    blocks = len(pattern.hashes)
    if index is not None:
        index.follow("engine", 1)
    chains = []
    for number in range(prefixes // blocks):
        chain = pattern._replace(hashes=[rng.getrandbits(61) for _ in range(blocks)])
        if index is not None:
            index.record(chain, PROMPT_TOKENS, "engine")
        elif number < 20_000:
            chains.append(chain)
    return chains


def _after(prefixes: int) -> random.Random:
    """The generator as it is once `prefixes` have been drawn."""
    rng = random.Random(2)
    _fill(None, rng, prefixes)
    return rng


def _read_tokenizer(path: Path) -> Callable[[str], object]:
    """Raises ValueError."""
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain exceptions
        raise ValueError(f"{path} is no tokenizer: {error}") from error
    return lambda prompt: tokenizer.encode(prompt, add_special_tokens=False)
