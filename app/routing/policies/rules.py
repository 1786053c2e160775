"""The paper's priority list, on measured features, as a table to be read against the paper.

Source: ModeSwitch-LLM (arXiv 2605.23057), routing rules. The paper resolves overlaps by the workload's name; here
the first rule that matches decides, and the last matches always. `rules` follows the paper's text;
`rules_published` differs in four targets, which are what the run behind the published 2.10x executed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from app.routing.classes import BETWEEN, HIGH, LONG, PREFILL_HEAVY_ABOVE_SCORE, SHORT, Shape
from app.routing.decision import Decision, Ineligible, LostBy, Outcome
from app.routing.eligibility import Eligibility, refusal
from app.routing.features import RequestFeatures
from app.routing.mode_info import ModeInfo
from app.routing.profile import Profile
from app.routing.settings import RoutingSettings
from app.routing.snapshot import Snapshot
from app.routing.tags import Tag


class Rule(NamedTuple):
    """`applies` is asked in order; the mode is the paper's."""

    name: str
    applies: Callable[[RequestFeatures], bool]
    mode: str


def _shapes(prompt: Shape, output: Shape) -> Callable[[RequestFeatures], bool]:
    def applies(features: RequestFeatures) -> bool:
        return features.prompt_shape is prompt and features.output_shape is output

    return applies


RULES: tuple[Rule, ...] = (
    Rule("batched", lambda f: f.batch_pressure is HIGH, "int8_continuous_batching"),
    Rule("shared prefix", lambda f: f.shared_prefix, "gptq_prefix_caching"),
    Rule("memory pressure", lambda f: f.memory_pressure, "gptq"),
    Rule("multiple choice or benchmark", lambda f: f.tag in (Tag.MULTIPLE_CHOICE, Tag.BENCHMARK), "int8"),
    Rule("mathematics", lambda f: f.tag is Tag.MATHEMATICS, "speculative"),
    Rule("short prompt, short output", _shapes(SHORT, SHORT), "gptq"),
    Rule("long prompt, short output", _shapes(LONG, SHORT), "gptq"),
    Rule("long prompt, long output", _shapes(LONG, LONG), "gptq"),
    Rule("short prompt, long output", _shapes(SHORT, LONG), "speculative"),
    Rule("medium prompt, long output", _shapes(BETWEEN, LONG), "speculative"),
    Rule("prefill score", lambda f: f.prefill_score > PREFILL_HEAVY_ABOVE_SCORE, "int8"),
    Rule("the rest", lambda f: True, "int8"),
)
"""The paper's text."""

PUBLISHED_TARGETS = {
    "short prompt, short output": "speculative",
    "short prompt, long output": "speculative",
    "long prompt, long output": "speculative",
    "long prompt, short output": "int8",
}

RULES_PUBLISHED: tuple[Rule, ...] = tuple(
    rule._replace(mode=PUBLISHED_TARGETS.get(rule.name, rule.mode)) for rule in RULES
)
"""What the published run executed."""

STAND_INS = {
    "int8_continuous_batching": ("int8",),
    "gptq_prefix_caching": ("gptq", "prefix_caching"),
    "gptq": ("gptq_prefix_caching", "awq"),
    "speculative": ("speculative_draft", "speculative_ngram"),
    "int8": ("int8_continuous_batching",),
}
"""What serves when a rule's mode is not deployed or not eligible; then INT8, then FP16, then whatever is left."""


class RulesPolicy:
    """The first rule that matches; of its modes the first that may serve."""

    __slots__ = ("_candidates", "_eligibility", "_profile_version", "_rules", "_settings_version", "name")

    def __init__(
        self,
        name: str,
        rules: tuple[Rule, ...],
        modes: Iterable[ModeInfo],
        settings: RoutingSettings,
        profile: Profile | None = None,
    ) -> None:
        self.name = name
        self._rules = rules
        self._eligibility = Eligibility(modes, settings, profile)
        self._settings_version = settings.version
        self._profile_version = None if profile is None else profile.version
        deployed = {mode.name: mode for mode in self._eligibility.modes}
        self._candidates: dict[str, tuple[ModeInfo, ...]] = {}
        for rule in rules:
            wanted = (rule.mode, *STAND_INS.get(rule.mode, ()), "int8", settings.reference_mode, *deployed)
            self._candidates[rule.mode] = tuple(deployed[n] for n in dict.fromkeys(wanted) if n in deployed)

    def decide(self, features: RequestFeatures, snapshot: Snapshot) -> Outcome:
        rules = self._rules
        place = 0
        while not rules[place].applies(features):
            place += 1
        rule = rules[place]
        refused: dict[str, Ineligible] = {}
        for mode in self._candidates[rule.mode]:
            why = self._eligibility.refuses(mode, features, snapshot)
            if why is None:
                runner_up = self._runner_up(place + 1, mode.name, features)
                return Decision(
                    mode=mode.name,
                    engine=mode.engine,
                    request_class=features.request_class,
                    policy=self.name,
                    settings_version=self._settings_version,
                    profile_version=self._profile_version,
                    rule=rule.name,
                    runner_up=runner_up,
                    lost_by=None if runner_up is None else LostBy.LATER_RULE,
                )
            refused[mode.name] = why
        return refusal(self.name, self._settings_version, features, refused)

    def _runner_up(self, place: int, chosen: str, features: RequestFeatures) -> str | None:
        """What the next rule that matches would have chosen instead."""
        for rule in self._rules[place:]:
            if rule.mode != chosen and rule.applies(features):
                return rule.mode
        return None
