"""Keys, budgets and shares: who is let in, how much, and in which order."""

import asyncio
import hashlib
from dataclasses import replace

import pytest
from starlette.testclient import TestClient

from app.config import AuthSettings, ConfigError, TenantLimits, load_live
from app.controller.errors import ApiError
from app.controller.routes import create_app
from app.controller.tenants import MAX_TENANTS, Keys, Tenants
from app.energy.queries import Share
from app.wire import EngineState, EngineStatus, Reply

CHAT = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "hello"}]}


def digest(key):
    return hashlib.sha256(key.encode()).digest()


def test_keys_come_from_the_environment_and_a_file(tmp_path, monkeypatch):
    file = tmp_path / "keys"
    file.write_text(f"# team keys\n\nblue:{digest('s3cret').hex()}\n")
    monkeypatch.setenv("SOME_KEYS", "red:hush, green:sh")
    keys = Keys.load(AuthSettings(keys_env="SOME_KEYS", keys_file=file))
    assert len(keys) == 3
    assert keys.tenant("Bearer s3cret") == "blue"
    assert keys.tenant("bearer  sh ") == "green"
    for wrong in ("", "Bearer", "Bearer ", "Bearer wrong", "Basic hush", "hush"):
        assert keys.tenant(wrong) is None


@pytest.mark.parametrize("text", ["blue", "blue:", ":abcd", "blue:xyz", "blue:abcd"])
def test_a_malformed_file_is_told_by_its_line_and_not_quoted(tmp_path, text):
    file = tmp_path / "keys"
    file.write_text(f"\n{text}\n")
    with pytest.raises(ConfigError, match="line 2") as told:
        Keys.load(AuthSettings(keys_env="NONE", keys_file=file))
    assert "abcd" not in str(told.value)


@pytest.mark.parametrize("text", ["blue", "blue:", ":hush-hush"])
def test_a_malformed_variable_is_told_and_not_quoted(monkeypatch, text):
    monkeypatch.setenv("SOME_KEYS", text)
    with pytest.raises(ConfigError, match="SOME_KEYS") as told:
        Keys.load(AuthSettings(keys_env="SOME_KEYS"))
    assert "hush" not in str(told.value)


def test_every_key_is_compared_in_constant_time_and_none_is_kept(monkeypatch):
    compared = []

    def compare(known, given):
        compared.append(known)
        return known == given

    monkeypatch.setattr("app.controller.tenants.hmac.compare_digest", compare)
    monkeypatch.setenv("SOME_KEYS", "red:hush, green:sh")
    keys = Keys.load(AuthSettings(keys_env="SOME_KEYS"))
    for given in ("Bearer hush", "Bearer sh", "Bearer wrong"):
        compared.clear()
        keys.tenant(given)
        assert compared == [digest("hush"), digest("sh")]
    assert "hush" not in str(vars(keys))


def test_a_key_of_two_tenants_is_refused_and_not_quoted(tmp_path, monkeypatch):
    monkeypatch.setenv("SOME_KEYS", "red:hush-hush,blue:hush-hush")
    with pytest.raises(ConfigError, match="'red' and 'blue' have the same API key") as told:
        Keys.load(AuthSettings(keys_env="SOME_KEYS"))
    assert "hush" not in str(told.value)
    file = tmp_path / "keys"
    file.write_text(f"red:{digest('hush').hex()}\n")
    monkeypatch.setenv("SOME_KEYS", "red:hush")
    assert len(Keys.load(AuthSettings(keys_env="SOME_KEYS", keys_file=file))) == 1
    monkeypatch.setenv("SOME_KEYS", "blue:hush")
    with pytest.raises(ConfigError, match="same API key"):
        Keys.load(AuthSettings(keys_env="SOME_KEYS", keys_file=file))


def test_a_file_that_cannot_be_read_is_told(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        Keys.load(AuthSettings(keys_file=tmp_path / "none"))


@pytest.mark.parametrize("text", ["", "\n\n", "# blue:abcd\n"])
def test_a_file_without_keys_does_not_open_the_server(tmp_path, monkeypatch, text):
    file = tmp_path / "keys"
    file.write_text(text)
    with pytest.raises(ConfigError, match=f"{file} held none"):
        Keys.load(AuthSettings(keys_env="SOME_KEYS", keys_file=file))
    monkeypatch.setenv("SOME_KEYS", "red:hush")
    assert Keys.load(AuthSettings(keys_env="SOME_KEYS", keys_file=file)).tenants == {"red"}


def test_a_variable_without_keys_does_not_open_the_server(monkeypatch):
    monkeypatch.setenv("SOME_KEYS", ",")
    with pytest.raises(ConfigError, match="SOME_KEYS held none"):
        Keys.load(AuthSettings(keys_env="SOME_KEYS"))


@pytest.mark.parametrize("variable", [None, ""])
def test_where_no_keys_are_configured_there_are_none(monkeypatch, variable):
    if variable is None:
        monkeypatch.delenv("SOME_KEYS", raising=False)
    else:
        monkeypatch.setenv("SOME_KEYS", variable)
    assert not Keys.load(AuthSettings(keys_env="SOME_KEYS"))


def test_without_keys_a_header_names_the_account_and_names_are_bounded():
    tenants = Tenants(Keys({}), {})
    assert tenants.who("", "") == "default"
    assert tenants.who("Bearer whatever", " blue ") == "blue"
    assert tenants.who("", "x" * 65) == "default"
    assert tenants.who("", "a\x00b") == "default"


def test_of_names_from_headers_the_one_not_seen_for_longest_gives_way():
    tenants = Tenants(Keys({}), {"limited": TenantLimits(share=2)})
    busy = tenants.admit(tenants.who("", "busy"), 10, 10, 0.0)
    for number in range(5 * MAX_TENANTS):
        name = tenants.who("", f"tenant {number}")
        assert name == f"tenant {number}"
        tenants.settle(tenants.admit(name, 1, 1, 0.0), 1, 1, 0.0)
        assert tenants.who("", "limited") == "limited"
    kept = set(tenants.counters())
    assert len(kept) <= MAX_TENANTS
    assert {"busy", f"tenant {5 * MAX_TENANTS - 1}"} <= kept
    assert "tenant 0" not in kept
    # While all have requests under way, further ones share an account.
    for number in range(MAX_TENANTS):
        tenants.admit(tenants.who("", f"slow {number}"), 1, 1, 0.0)
    assert tenants.who("", "one more") == "other"
    assert tenants.who("", "busy") == "busy"
    tenants.settle(busy, 10, 10, 0.0)
    assert tenants.who("", "one more") == "one more"


def test_with_keys_the_header_is_ignored():
    tenants = Tenants(Keys({digest("k"): "red"}), {})
    assert tenants.who("Bearer k", "blue") == "red"
    for authorization in ("", "Bearer no"):
        with pytest.raises(ApiError) as refused:
            tenants.who(authorization, "red")
        assert (refused.value.status, refused.value.code) == (401, "invalid_api_key")


def test_a_budget_is_reserved_up_front_and_settled_at_the_end():
    tenants = Tenants(Keys({}), {"red": TenantLimits(tokens_per_s=10, burst_tokens=100)})
    first = tenants.admit("red", 40, 50, 0.0)
    with pytest.raises(ApiError) as refused:
        tenants.admit("red", 40, 50, 0.0)
    assert (refused.value.status, refused.value.code) == (429, "token_budget_exhausted")
    assert refused.value.headers["retry-after"] == "8"
    tenants.settle(first, 40, 0, 0.0)
    tenants.settle(first, 40, 0, 0.0)
    assert tenants.admit("red", 40, 20, 0.0)
    assert tenants.admit("blue", 10_000, 10_000, 0.0)


def test_new_limits_leave_an_unchanged_budget_as_it_is():
    limits = {"red": TenantLimits(tokens_per_s=1, burst_tokens=10)}
    tenants = Tenants(Keys({}), limits)
    tenants.admit("red", 5, 5, 0.0)
    tenants.limit(limits, 0.0)
    with pytest.raises(ApiError):
        tenants.admit("red", 5, 5, 0.0)
    tenants.limit({"red": TenantLimits(tokens_per_s=1, burst_tokens=10, share=3)}, 0.0)
    assert tenants.share("red") == 3
    with pytest.raises(ApiError):
        tenants.admit("red", 5, 5, 0.0)
    tenants.limit({}, 0.0)
    assert tenants.admit("red", 5, 5, 0.0)


def test_what_was_reserved_goes_back_to_the_budget_it_came_from():
    tenants = Tenants(Keys({}), {"red": TenantLimits(tokens_per_s=1, burst_tokens=100)})
    first = tenants.admit("red", 50, 50, 0.0)
    tenants.limit({"red": TenantLimits(tokens_per_s=1, burst_tokens=40)}, 0.0)
    tenants.admit("red", 20, 20, 0.0)
    tenants.settle(first, 50, 0, 0.0)
    with pytest.raises(ApiError):
        tenants.admit("red", 1, 0, 0.0)
    tenants.limit({}, 0.0)
    unlimited = tenants.admit("red", 1000, 0, 0.0)
    tenants.limit({"red": TenantLimits(tokens_per_s=1, burst_tokens=40)}, 0.0)
    tenants.settle(unlimited, 1000, 1000, 0.0)
    assert tenants.admit("red", 20, 20, 0.0)


def test_there_are_several_tenants_once_a_second_one_asks_or_has_a_key():
    tenants = Tenants(Keys({}), {})
    for name in ("red", "red", "blue"):
        assert not tenants.several
        tenants.who("", "somebody")
        tenants.admit(name, 1, 1, 0.0)
    assert tenants.several
    assert not Tenants(Keys({digest("k"): "red", digest("l"): "red"}), {}).several
    assert Tenants(Keys({digest("k"): "red", digest("l"): "blue"}), {}).several


@pytest.mark.parametrize(("keys", "warned"), [({}, True), ({digest("k"): "red"}, False)])
def test_that_keys_are_off_is_said_at_the_start(caplog, keys, warned):
    Tenants(Keys(keys), {})
    assert ("API keys are off" in caplog.text) == warned


def test_a_heavy_tenant_waits_behind_a_light_one():
    tenants = Tenants(Keys({}), {})

    def ask(tenant, prompt_tokens):
        return tenants.admit(tenant, prompt_tokens, prompt_tokens // 5, 0.0).priority

    flood = [ask("heavy", 1000) for _ in range(10)]
    assert flood == sorted(flood)
    assert flood[-1] > flood[0]
    # The light one begins where the heavy one is: it has saved up no credit. From there on it stays in front.
    first = ask("light", 100)
    assert first >= flood[-1]
    heavy = [ask("heavy", 1000) for _ in range(5)]
    light = [ask("light", 100) for _ in range(5)]
    assert light[-1] < heavy[1]


@pytest.mark.parametrize("keys", [Keys({digest("k"): "red"})])
def test_everything_but_health_wants_a_key(service, meter, engines, records):
    client = TestClient(create_app(service, meter))
    for method, path in [
        ("POST", CHAT), ("POST", "/v1/completions"), ("GET", "/v1/models"), ("GET", "/v1/models/auto"),
        ("GET", "/v1/modes"), ("GET", "/v1/energy"), ("GET", "/v1/requests/x"), ("POST", "/admin/reset_prefix_cache"),
    ]:  # fmt: skip
        answer = client.request(method, path, **({"json": HELLO | {"prompt": "x"}} if method == "POST" else {}))
        assert (path, answer.status_code) == (path, 401)
        assert answer.json()["error"]["code"] == "invalid_api_key"
    assert client.get("/health").status_code == 200
    headers = {"authorization": "Bearer k", "x-modeswitch-tenant": "blue"}
    assert client.post(CHAT, json=HELLO, headers=headers).status_code == 200
    (call,) = [call for engine in engines.values() for call in engine.calls]
    assert call.tenant == records.records[-1].tenant == "red"


@pytest.mark.parametrize("keys", [Keys({digest("k"): "red"})])
def test_with_keys_a_tenant_sees_its_own_requests_only(service, meter):
    client = TestClient(create_app(service, meter))
    for tenant in ("red", "blue"):
        meter.requests[tenant] = {"request_id": tenant, "record": {"tenant": tenant}, "energy": {}}
    headers = {"authorization": "Bearer k"}
    assert client.get("/v1/requests/red", headers=headers).status_code == 200
    assert client.get("/v1/requests/blue", headers=headers).status_code == 404


@pytest.mark.parametrize("keys", [Keys({digest("k"): "red", digest("a"): "operators"})])
@pytest.mark.parametrize(("key", "sees"), [("k", {"red"}), ("a", {"red", "blue"})])
def test_with_keys_a_tenant_sees_its_own_figures_and_an_admin_all(service, meter, keys, key, sees):
    service.tenants = Tenants(keys, {}, ("operators",))
    for tenant in ("red", "blue"):
        service.tenants.admit(tenant, 10, 10, 0.0)
        meter.requests[tenant] = {"request_id": tenant, "record": {"tenant": tenant}, "energy": {}}
    meter.by = {
        tenant: {"tenant": tuple(Share(name, *(1.0,) * 5) for name in names)}
        for tenant, names in ((None, ("red", "blue")), ("red", ("red",)))
    }
    client = TestClient(create_app(service, meter), headers={"authorization": f"Bearer {key}"})
    assert set(client.get("/v1/modes").json()["tenants"]) == sees
    account = client.get("/v1/energy").json()
    assert {share["name"] for share in account["by"]["tenant"]} == sees
    assert account["tenant"] == (None if key == "a" else "red")
    assert {name for name in ("red", "blue") if client.get(f"/v1/requests/{name}").status_code == 200} == sees


@pytest.mark.parametrize("keys", [Keys({digest("k"): "red", digest("a"): "operators"})])
def test_with_keys_only_an_admin_sees_how_much_the_device_did(service, meter, keys):
    service.tenants = Tenants(keys, {}, ("operators",))
    device = {"device": "GPU-0", "name": "A100", "method": "nvml_counter", "scope": "whole GPU", "notes": []}
    meter.meter_state = {"measuring": True, "devices": [{**device, "engine_watts": {"fp16": 200.0}}], "backlog": 3}
    client = TestClient(create_app(service, meter))

    def shown(path, key):
        return client.get(path, headers={"authorization": f"Bearer {key}"}).json()

    assert shown("/v1/energy", "a")["meter"] == meter.meter_state
    assert shown("/v1/energy", "k")["meter"] == {"measuring": True, "devices": [device]}
    whole, own = (shown("/v1/modes", key)["engines"][0] for key in ("a", "k"))
    volumes = {"steps", "prompt_tokens", "generation_tokens", "prefix_queries_tokens", "prefix_hits_tokens"}
    volumes |= {"draft_tokens", "accepted_tokens", "preemptions", "env"}
    assert own.keys() == whole.keys() - volumes
    age = {"reported_s_ago"}  # grows between the two
    assert all(own[name] == whole[name] for name in own.keys() - age)
    assert volumes <= whole.keys()
    assert own["resident_bytes"] == 5


@pytest.mark.parametrize("keys", [Keys({digest("k"): "red", digest("a"): "operators"})])
def test_with_keys_only_admins_reset_caches(service, meter, keys):
    service.tenants = Tenants(keys, {}, ("operators",))
    client = TestClient(create_app(service, meter))

    def reset(key):
        return client.post("/admin/reset_prefix_cache", headers={"authorization": f"Bearer {key}"})

    assert (reset("k").status_code, reset("k").json()["error"]["code"]) == (403, "admins_only")
    assert reset("a").status_code == 200


def test_a_share_becomes_a_priority_where_the_engine_takes_one(service, meter, engines):
    client = TestClient(create_app(service, meter))
    body = {**HELLO, "model": "smollm2-135m-instruct:fp16", "max_tokens": 1000, "priority": -7}
    fp16 = service.links[0]

    def priorities(tenant, count):
        before = len(engines["fp16"].calls)
        for _ in range(count):
            client.post(CHAT, json=body, headers={"x-modeswitch-tenant": tenant})
        return [call.body.get("priority") for call in engines["fp16"].calls[before:]]

    assert priorities("heavy", 1) == [None]
    fp16.status = EngineStatus("fp16", EngineState.READY, 1, engine_args={"scheduling_policy": "priority"})
    heavy = [service.tenants.admit("heavy", 1000, 1000, 0.0).priority for _ in range(5)]
    (light,) = priorities("light", 1)
    (later,) = priorities("heavy", 1)
    assert -7 not in (light, later)
    assert light <= later
    assert heavy == sorted(heavy)


@pytest.fixture
def crowd(service, incoming):
    """`crowd(tenant)`: requests of one tenant to fp16 that nobody answers, until it is refused: how many, and why."""
    asking = []

    async def fill(tenant, at_most=1000):
        headers = {"x-modeswitch-tenant": tenant}
        for count in range(at_most):
            request = incoming(model="smollm2-135m-instruct:fp16", headers=headers)
            task = asyncio.create_task(service.answer(replace(request, named=True)))
            for _ in range(5):
                await asyncio.sleep(0)
            if task.done():
                with pytest.raises(ApiError) as refused:
                    task.result()
                return count, refused.value
            asking.append(task)
        return at_most, None

    yield fill
    for task in asking:
        task.cancel()


async def test_a_heavy_tenant_leaves_room_in_the_queue_for_a_light_one(service, engines, crowd):
    """litellm#17664: a noisy tenant is slowed, a light tenant is not."""
    service.change(load_live(service.router.live, {"queue_limit": 12, "tenants": {"double": {"share": 2}}}))
    engines["fp16"].answer = lambda call: asyncio.sleep(3600)
    assert (await crowd("light", 1)) == (1, None)
    taken, refused = await crowd("heavy")
    assert taken == 6
    assert (refused.status, refused.code) == (503, "tenant_queue_full")
    assert int(refused.headers["retry-after"]) >= 1
    assert (await crowd("light", 1)) == (1, None)
    assert (await crowd("double"))[0] == 3
    assert (await crowd("late"))[0] == 1
    # The places are each engine's own.
    assert not service._crowded_engines("heavy")[1:]


async def test_a_tenant_alone_may_fill_the_queue_and_others_come_again_when_it_has_drained(service, engines, crowd):
    service.change(load_live(service.router.live, {"queue_limit": 5}))
    done = asyncio.Event()

    async def answer(call):
        await done.wait()
        return Reply(200, b"{}")

    engines["fp16"].answer = answer
    taken, refused = await crowd("heavy")
    assert (taken, refused.status, refused.code) == (5, 503, "queue_full")
    assert (await crowd("light", 1))[1].code == "queue_full"
    done.set()
    await asyncio.sleep(0.01)
    done.clear()
    assert (await crowd("light", 1)) == (1, None)
    assert (await crowd("heavy"))[0] == 2
