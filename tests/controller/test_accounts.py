"""Energy and requests over HTTP: answers, ranges that make no sense, and a meter that is out of reach."""

import re
from urllib.parse import quote

import pytest
from starlette.testclient import TestClient

from app.controller.routes import create_app


@pytest.fixture
def client(service, meter):
    return TestClient(create_app(service, meter))


def test_nothing_measured_is_null(client):
    found = client.get("/v1/energy").json()
    assert found["object"] == "energy"
    assert found["measured_j"] is None
    assert found["meter"] == {"measuring": False}


@pytest.mark.parametrize(
    "query", ["since=2&until=1", "since=x", "since=nan", "since=-1", "since=99999999999", "until=inf"]
)
def test_a_range_that_makes_no_sense_is_refused(client, query):
    answer = client.get(f"/v1/energy?{query}")
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "bad_time_range")


def test_a_request_is_found_or_unknown(client, meter):
    meter.requests["mine"] = {"request_id": "mine.1", "record": None, "energy": {}}
    assert client.get("/v1/requests/mine").json()["request_id"] == "mine.1"
    answer = client.get("/v1/requests/other")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "request_not_found")


@pytest.mark.parametrize("name", ["mine", "order 7/8 of: ä", "x" * 128, "x" * 2000, "a?#"])
def test_what_a_client_calls_its_request_is_understood_whatever_it_is(client, meter, records, name):
    hello = {"messages": [{"role": "user", "content": "hello"}]}
    answer = client.post("/v1/chat/completions", json=hello, headers={"x-request-id": name.encode()})
    (record,) = records.records
    assert answer.headers["x-modeswitch-request-id"] == record.request_id
    named, _, _ = record.request_id.rpartition(".")
    assert re.fullmatch(r"[\w.:-]{1,128}", named, re.ASCII)
    # The ledger finds the latest of a name, and each by its whole id.
    meter.requests = {named: {"request_id": "latest", "record": None}, record.request_id: {"request_id": "whole"}}
    assert client.get(f"/v1/requests/{quote(name, safe='')}").json()["request_id"] == "latest"
    assert client.get(f"/v1/requests/{record.request_id}").json()["request_id"] == "whole"


def test_a_meter_out_of_reach_disturbs_nothing_else(client, meter):
    meter.broken = True
    answer = client.get("/v1/energy")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "meter_unavailable")
    assert answer.headers["retry-after"]
    assert client.get("/v1/models").status_code == 200
