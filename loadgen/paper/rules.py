"""This project's rule tables on the paper's families: what they choose by features alone, without a workload's name."""

from app.routing.classes import output_shape, prefill_score, prompt_shape
from app.routing.features import RequestFeatures
from app.routing.policies.rules import RULES, RULES_PUBLISHED, Rule
from loadgen.paper.tables import FP16, Family, PaperTables

PAPER_NAMES = {
    "fp16": FP16,
    "int8": "int8_quant",
    "gptq": "gptq_4bit",
    "speculative": "speculative_decoding",
    "prefix_caching": "prefix_caching",
    "gptq_prefix_caching": "gptq_plus_prefix_caching",
}
"""Our modes in the tables' words."""


def rule_choices(tables: PaperTables) -> dict[str, dict[str, str]]:
    """Modes by family that `rules` and `rules_published` choose for single requests, in the tables' words."""
    return {
        name: {family: PAPER_NAMES[_first(rules, row)] for family, row in tables.families.items()}
        for name, rules in (("rules", RULES), ("rules_published", RULES_PUBLISHED))
    }


def _first(rules: tuple[Rule, ...], family: Family) -> str:
    prompt, output = family.prompt_tokens, family.expected_output_tokens
    features = RequestFeatures(
        prompt_tokens=prompt,
        expected_output_tokens=output,
        shared_prefix=family.shared_prefix,
        memory_pressure=family.memory_pressure,
        tag=family.tag,
        prompt_shape=prompt_shape(prompt),
        output_shape=output_shape(output),
        prefill_score=prefill_score(prompt, output, family.memory_pressure),
    )
    return next(rule.mode for rule in rules if rule.applies(features))
