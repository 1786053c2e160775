"""What reporting activity costs an engine: `python -m app.engines.activity_cost [--requests 64] [--step-ms 10]`.

Plays decode steps through the same code that watches vLLM's results, and takes, pickles and keeps a batch as often as
the sender does. Printed is CPU time as a share of a step: an upper bound of what it takes from throughput, since an
engine on a GPU computes meanwhile.
"""

from __future__ import annotations

import argparse
import pickle
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace

from app.energy.activity import ActivityRecorder
from app.energy.client import FLUSH_S
from app.engines.activity import Activity
from app.wire import Call, Endpoint

_STEPS = 5000


class _Processor:
    """Stands where vLLM's output processor stands, and does nothing."""

    def add_request(self, request: object) -> None: ...

    def process_outputs(self, outputs: object) -> None: ...


def measure(requests: int, steps_per_batch: int, steps: int = _STEPS) -> tuple[float, float]:
    """CPU seconds of one step's report, and of one batch."""
    recorder = ActivityRecorder("engine")
    activity, processor = Activity(recorder), _Processor()
    activity.watch(processor)
    outputs = []
    for number in range(requests):
        name = f"chatcmpl-{number:032x}"
        activity.begin(Call(name, name, Endpoint.CHAT, "fp16", {}))
        processor.add_request(SimpleNamespace(request_id=name, prompt_token_ids=[0]))
        outputs.append(
            SimpleNamespace(request_id=name, new_token_ids=[0], finish_reason=None, prefill_stats=None, events=None)
        )
    step_s, batch_s = 0.0, 0.0
    for number in range(steps):
        step_s += _cpu_s(lambda: processor.process_outputs(outputs))
        if number % steps_per_batch == steps_per_batch - 1:
            batch_s += _cpu_s(lambda: pickle.dumps(recorder.take()))
    return step_s / steps, batch_s / (steps // steps_per_batch)


def _cpu_s(call: Callable[[], object]) -> float:
    begun_s = time.thread_time()
    call()
    return time.thread_time() - begun_s


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m app.engines.activity_cost", description=__doc__)
    parser.add_argument("--requests", type=int, default=64, help="requests in the batch (default 64)")
    parser.add_argument("--step-ms", type=float, default=10.0, help="length of a decode step (default 10)")
    options = parser.parse_args(arguments)
    steps_per_batch = max(1, round(FLUSH_S * 1e3 / options.step_ms))
    step_s, batch_s = measure(options.requests, steps_per_batch)
    share = (step_s + batch_s / steps_per_batch) / (options.step_ms / 1e3)
    print(f"step        {step_s * 1e6:.1f} us of CPU with {options.requests} requests")
    print(f"batch       {batch_s * 1e6:.1f} us every {steps_per_batch} steps")
    print(f"activity    {share:.2%} of a step of {options.step_ms:g} ms (at most 1 % is expected)")


if __name__ == "__main__":
    main()
