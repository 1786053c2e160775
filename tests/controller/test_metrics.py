"""What is told to Prometheus in a run: every figure of the table, under labels that clients cannot multiply."""

from collections import defaultdict

import pytest
from starlette.testclient import TestClient

from app.config import load_live
from app.controller.knowledge import Knowledge
from app.controller.links import EngineLost
from app.controller.routes import create_app
from app.controller.tenants import Keys, Tenants
from app.routing.classes import RequestClass
from app.routing.policies.rules import RULES
from app.routing.profile import parse_profile
from app.telemetry import CONTROLLER_METRICS
from app.wire import Reply
from tests.routing.conftest import profile_content

CHAT = "/v1/chat/completions"
POLICIES = ("cost", "rules", "rules_published", "static:gptq", "static:fp16")
NAMED, REFERENCE = "the mode that was named", "the reference, while the named mode cannot serve"
STATUSES = {"ok", "failed", "refused", "aborted", "deadline"}


class Told:
    """Keeps what is told: the label values of each metric."""

    def __init__(self):
        self.labels = defaultdict(set)

    def _keep(self, name, *values):
        self.labels[name].add(values)

    def count(self, name, *labels, by=1.0):
        self._keep(name, *labels)

    def set(self, name, value, *labels):
        self._keep(name, *labels)

    def observe(self, name, value, *labels):
        self._keep(name, *labels)

    def values(self, label, of="modeswitch_"):
        """All values of a label, over the metrics whose name begins with `of`."""
        found = set()
        for name, kept in self.labels.items():
            for labels in kept:
                found |= {
                    value
                    for one, value in zip(CONTROLLER_METRICS[name].labels, labels, strict=True)
                    if one == label and name.startswith(of)
                }
        return found


@pytest.fixture
def knowledge():
    return Knowledge("tiny", "box", parse_profile(profile_content(), model="tiny", hardware="box"))


@pytest.fixture
def told(service):
    service._telemetry = service._settlement._telemetry = Told()
    return service._telemetry


@pytest.fixture
def client(service, meter):
    return TestClient(create_app(service, meter), raise_server_exceptions=False)


@pytest.fixture
def chat(client, engines, usage):
    for engine in engines.values():
        engine.answer = Reply(200, b"{}", usage(output_tokens=20))

    def send(content="hello", headers=None, **body):
        return client.post(CHAT, json={"messages": [{"role": "user", "content": content}], **body}, headers=headers)

    return send


def run(chat, client, service, engines):
    for policy in POLICIES:
        chat(headers={"x-modeswitch-policy": policy})
    chat(model="smollm2-135m-instruct:int8")
    engines["speculative"].answer = EngineLost("it died")
    chat(headers={"x-modeswitch-policy": "static:speculative"})
    service.change(load_live(service.router.live, {"routing": {"exploration_rate": 1.0}}))
    chat()
    service.change(load_live(service.router.live, {"routing": {"exploration_rate": 0.0}}))
    service.tell_gauges()
    for refused in (dict(content=b"{"), dict(json={"messages": [], "model": "x"}), dict(content=b" " * 20_000)):
        assert client.post(CHAT, **refused).status_code >= 400
    assert client.get("/v1/requests/none").status_code == 404


def test_a_run_tells_every_metric_of_the_table(told, chat, client, service, engines):
    run(chat, client, service, engines)
    assert told.labels.keys() == CONTROLLER_METRICS.keys()
    modes = set(service.table.modes)
    assert told.values("mode", of="modeswitch_breaker") == modes
    assert told.values("engine", of="modeswitch_in_flight") == set(engines)
    assert told.values("engine", of="modeswitch_reroutes") == {"speculative"}
    assert {"lowest_cost", "named", "explored", NAMED} <= told.values("reason", of="modeswitch_decisions")
    refusals = told.values("reason", of="modeswitch_refusals")
    assert refusals == {"invalid_json", "invalid_request", "request_too_large", "request_not_found"}


def test_clients_cannot_multiply_labels(told, chat, client, service, engines):
    run(chat, client, service, engines)
    for number in range(30):
        word = f"word-{number}"
        headers = {"x-modeswitch-workload": word, "x-modeswitch-tenant": word, "x-request-id": word}
        chat(word, headers=headers, metadata={"workload": word}, user=word)
        for bad in ({"policy": word}, {"objective": word}, {"deadline-ms": word}, {"include": word}):
            chat(headers={f"x-modeswitch-{name}": value for name, value in bad.items()})
        chat(model=word)
        chat(model=f"smollm2-135m-instruct:{word}")
        client.get(f"/v1/requests/{word}")
        client.get(f"/v1/models/{word}")
        client.get(f"/v1/energy?since={word}")
        client.get(f"/{word}")
    modes = set(service.table.modes)
    assert told.values("mode") <= modes
    assert told.values("engine") <= set(engines)
    assert told.values("status") <= STATUSES
    assert told.values("request_class") <= {str(one) for one in RequestClass}
    assert told.values("policy") <= {*POLICIES, *(f"static:{mode}" for mode in modes)}
    reasons = {"lowest_cost", "named", "explored", NAMED, REFERENCE, *(rule.name for rule in RULES)}
    assert told.values("reason", of="modeswitch_decisions") <= reasons
    assert not {reason for reason in told.values("reason") if "word" in reason}
    assert len(told.values("reason", of="modeswitch_refusals")) < 15


def test_a_missing_key_is_a_refusal_like_others(told, client, service):
    service.tenants = Tenants(Keys({b"\0" * 32: "red"}), {})
    for path in ("/v1/modes", "/v1/models"):
        assert client.get(path).status_code == 401
    assert client.post(CHAT, json={"messages": [{"role": "user", "content": "hello"}]}).status_code == 401
    assert told.values("reason") == {"invalid_api_key"}
