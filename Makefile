# Needs Python 3.11. `make serve` and `make test` set up what is missing and skip what is done.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
REQUIREMENTS := $(wildcard requirements/cpu.txt requirements/loadgen.txt requirements/dev.txt)

.PHONY: setup serve test test-modes unit lint clean

setup: $(VENV)/.installed
	@$(BIN)/python -m app.engines.prepare

serve: setup
	@exec $(BIN)/python -m app.launch serve_config.yaml

# What takes seconds comes before what takes minutes.
test: lint setup
	$(BIN)/python -m pytest

test-modes: setup
	@$(BIN)/python -m app.engines.prepare --scheme awq
	MODESWITCH_TEST_ALL_MODES=1 $(BIN)/python -m pytest tests/application/test_requested_modes.py

unit: $(VENV)/.installed lint
	$(BIN)/python -m pytest -m "not engine"

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# --no-deps: the list is complete, and resolving would add torchvision, whose build does not match this torch and
# breaks the import of every text model. The last step shows that models import.
$(VENV)/.installed: $(REQUIREMENTS) pyproject.toml
	@date +"%T creating the environment in $(VENV)"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check --no-deps $(addprefix -r ,$(REQUIREMENTS))
	$(BIN)/python -m pip install --disable-pip-version-check --no-deps -e .
	$(BIN)/python -c "import transformers.models.llama, vllm, ray.serve"
	@touch $@
	@echo "environment ready after $$(( $$(date +%s) - $$(stat -c %Y $(VENV)/pyvenv.cfg) )) s"

clean:
	rm -rf $(VENV)
