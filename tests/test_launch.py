"""What the launcher says before anything starts."""

import socket

import pytest
import typer
import yaml

from app.launch import main


def test_a_port_in_use_is_one_clear_line(tmp_path, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config = tmp_path / "config.yaml"
        config.write_text(yaml.safe_dump({"http_options": {"host": "127.0.0.1", "port": port}}))
        with pytest.raises(typer.Exit) as ended:
            main(config)
    assert ended.value.exit_code == 1
    assert f"http://127.0.0.1:{port} is in use" in capsys.readouterr().out.replace("\n", " ")
