"""Bad input to the real application: OpenAI's envelope, the right status, and nothing else disturbed."""

import pytest
import requests

pytestmark = pytest.mark.engine
HELLO = {"model": "auto", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}


def error_of(answer):
    assert answer.headers["content-type"] == "application/json", answer.text
    assert set(answer.json()) == {"error"}
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    return answer.json()["error"]


@pytest.mark.parametrize(
    ("request_", "status", "code"),
    [
        (dict(data="{"), 400, "invalid_json"),
        (dict(data=b"\xff\xfe"), 400, "invalid_json"),
        (dict(json={**HELLO, "model": "gpt-4"}), 404, "model_not_found"),
        (dict(json={**HELLO, "model": "smollm2-135m-instruct:warp"}), 404, "model_not_found"),
        (dict(json={**HELLO, "max_tokens": "many"}), 400, None),
        (dict(json={**HELLO, "max_tokens": -1}), 400, None),
        (dict(json={**HELLO, "max_tokens": 10**9}), 400, None),
        (dict(json={**HELLO, "temperature": 99}), 400, None),
        (dict(json={**HELLO, "n": 0}), 400, None),
        (dict(json={**HELLO, "messages": [{"role": "user", "content": {"a": 1}}]}), 400, None),
        (dict(json={**HELLO, "tools": "none"}), 400, None),
        (dict(json={**HELLO, "response_format": {"type": "json_schema"}}), 400, None),
        (dict(json={**HELLO, "stream": True, "temperature": 99}), 400, None),
        (
            dict(json={**HELLO, "messages": [{"role": "user", "content": "a b " * 9000}]}),
            400,
            "context_length_exceeded",
        ),
        (dict(data=b" " * (9 * 2**20)), 413, "request_too_large"),
    ],
)
def test_bad_input_is_refused_and_disturbs_nothing(application, request_, status, code):
    answer = requests.post(f"{application.url}/v1/chat/completions", timeout=120, **request_)
    assert answer.status_code == status, answer.text
    error = error_of(answer)
    assert error["type"] == "invalid_request_error"
    if code:
        assert error["code"] == code
    assert requests.post(f"{application.url}/v1/chat/completions", json=HELLO, timeout=120).status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/chat/completions", 405),
        ("PUT", "/v1/models", 405),
        ("GET", "/nothing", 404),
        ("GET", "/v1/models/x", 404),
    ],
)
def test_wrong_paths_and_methods(application, method, path, status):
    answer = requests.request(method, application.url + path, timeout=60)
    assert answer.status_code == status
    error_of(answer)


def test_a_padded_model_name_is_trimmed(application):
    answer = requests.post(
        f"{application.url}/v1/chat/completions",
        json={**HELLO, "model": "  smollm2-135m-instruct : int8 "},
        timeout=120,
    )
    assert answer.headers["x-modeswitch-mode"] == "int8"
