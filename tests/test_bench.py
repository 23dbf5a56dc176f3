"""`openelm bench`: what is timed, proved with a clock that only the model moves, and with real lazy work.

faults.md I5 (characters counted as tokens) cannot occur: `measure` deals in ids and never sees a text.
"""

import json
import subprocess
import sys
import time
from types import SimpleNamespace

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from openelm_mlx.benchmarks.measure import check_lengths, choose_lengths, measure, prompt_ids
from openelm_mlx.cli import main
from openelm_mlx.errors import GenerationError

EOS = 2
PROMPT = 8


class FakeModel:
    """Takes `prefill_s` for a prompt and `step_s` for a token, by its own clock, and always wants to end the text.

    slowness: how much slower each generation is, in order; the last one goes on.
    """

    def __init__(self, prefill_s=1.0, step_s=0.1, slowness=(1.0,), context=2048):
        self.config = SimpleNamespace(vocab_size=10, max_context_length=context)
        self.prefill_s, self.step_s, self.slowness = prefill_s, step_s, list(slowness)
        self.now = 0.0
        self.shapes = []

    def __call__(self, tokens, cache, *, last_only):
        self.shapes.append(tokens.shape)
        is_prompt = tokens.shape[1] > 1
        if is_prompt and len(self.prompts) > 1 and len(self.slowness) > 1:
            self.slowness.pop(0)
        self.now += (self.prefill_s if is_prompt else self.step_s) * self.slowness[0]
        return mx.zeros((1, 1, 10)).at[0, 0, EOS].add(1)

    @property
    def prompts(self):
        return [shape for shape in self.shapes if shape[1] > 1]

    def clock(self):
        return self.now

    def make_cache(self):
        return []

    def parameters(self):
        return {"weight": mx.zeros((4,), dtype=mx.float16)}

    def modules(self):
        return []


def run(model, generation_tokens=11, trials=2, clock=None):
    return measure(model, "fake", PROMPT, generation_tokens, trials, clock=clock or model.clock)


def test_the_warm_up_is_run_and_has_the_same_shape():
    """Faults I1, I2: a warm-up that never runs, or is smaller than what it warms up for."""
    model = FakeModel()
    result = run(model, trials=2)
    once = [(1, PROMPT)] + [(1, 1)] * 10
    assert model.shapes == once * 3
    assert len(result.trials) == 2


def test_a_slow_first_run_is_not_in_the_result():
    """Fault I2."""
    result = run(FakeModel(slowness=(10.0, 1.0)))
    assert [trial.ttft_s for trial in result.trials] == pytest.approx([1.0, 1.0])
    assert result.spread("generation_tps") == pytest.approx((10.0, 10.0))


def test_the_first_token_belongs_to_prefill():
    """Fault I4: 1 s of prefill and 0.1 s a step make 8 and 10 tokens/s with 11 tokens, not 11."""
    result = run(FakeModel(prefill_s=1.0, step_s=0.1), generation_tokens=11)
    assert result.prompt_tps == pytest.approx(8.0)
    assert result.ttft_s == pytest.approx(1.0)
    assert result.generation_tps == pytest.approx(10.0)


def test_eos_is_ignored():
    """Fault I6: the fake wants EOS from the first token on."""
    model = FakeModel()
    run(model, generation_tokens=11, trials=1)
    assert len(model.shapes) == 2 * 11


def test_one_token_has_no_decode_rate():
    result = run(FakeModel(), generation_tokens=1)
    assert result.prompt_tps == pytest.approx(8.0)
    assert result.generation_tps is None
    assert json.loads(json.dumps(result.to_dict()))["generation_tps"] is None


def test_a_clock_that_stands_still_gives_no_rate():
    result = run(FakeModel(), clock=lambda: 5.0)
    assert (result.prompt_tps, result.generation_tps, result.ttft_s) == (None, None, 0.0)


def test_trials_keep_their_order_and_the_summary_is_their_median():
    result = run(FakeModel(slowness=(1.0, 1.0, 2.0, 4.0)), trials=3)
    assert [trial.generation_tps for trial in result.trials] == pytest.approx([10.0, 5.0, 2.5])
    assert result.generation_tps == pytest.approx(5.0)
    assert result.spread("prompt_tps") == pytest.approx((2.0, 8.0))


class WorkingModel(FakeModel):
    """Returns logits that nobody has computed yet; the work is real, and lies in the prompt or in each step."""

    def __init__(self, work_in_prompt):
        super().__init__()
        self.work_in_prompt = work_in_prompt
        self.noise = mx.random.uniform(shape=(1_000_000,), key=mx.random.key(0))
        mx.eval(self.noise)

    def work(self):
        return mx.sort(mx.sin(self.noise))[0] * 0

    def __call__(self, tokens, cache, *, last_only):
        logits = super().__call__(tokens, cache, last_only=last_only)
        return logits + self.work() if self.work_in_prompt == (tokens.shape[1] > 1) else logits


@pytest.mark.parametrize("work_in_prompt", [True, False])
def test_lazy_work_is_charged_to_the_phase_that_asked_for_it(work_in_prompt):
    """Faults I3 and I10: a timestamp waits for the work before it, and peak memory starts again with each phase."""
    model = WorkingModel(work_in_prompt)
    start = time.perf_counter()
    mx.eval(model.work())
    alone_s = time.perf_counter() - start
    (trial,) = run(model, generation_tokens=3, trials=1, clock=time.perf_counter).trials
    working_s, idle_s = (trial.ttft_s, trial.decode_s) if work_in_prompt else (trial.decode_s, trial.ttft_s)
    assert working_s > alone_s / 3
    assert idle_s < working_s / 3
    peaks = (trial.prefill_peak_memory_bytes, trial.decode_peak_memory_bytes)
    working_peak, idle_peak = peaks if work_in_prompt else peaks[::-1]
    assert working_peak - idle_peak > model.noise.nbytes / 2


def test_the_prompt_is_the_same_every_time_and_inside_the_vocabulary():
    ids = prompt_ids(200, 50)
    assert ids == prompt_ids(200, 50)
    assert ids[:20] == prompt_ids(20, 50)
    assert set(ids) <= set(range(50))
    assert len(set(ids)) > 25


def test_default_lengths_are_512_and_128_where_they_fit():
    assert choose_lengths(None, None, 2048) == (512, 128)
    assert choose_lengths(None, None, 640) == (512, 128)


@given(st.integers(2, 1000), st.none() | st.integers(1, 1000), st.none() | st.integers(1, 1000))
def test_default_lengths_shrink_and_lengths_asked_for_do_not(context, prompt, generation):
    if (prompt or 1) + (generation or 1) > context:
        with pytest.raises(GenerationError, match=str(context)):
            choose_lengths(prompt, generation, context)
        return
    chosen = choose_lengths(prompt, generation, context)
    check_lengths(*chosen, context)
    assert chosen == (prompt or chosen[0], generation or chosen[1])
    assert chosen[0] <= max(512, prompt or 0)
    assert chosen[1] <= max(128, generation or 0)


@pytest.mark.parametrize("numbers", [(0, 4, 1), (4, 0, 1), (4, 4, 0), (-1, 4, 1)])
def test_counts_below_one_are_refused(numbers):
    with pytest.raises(GenerationError, match=f"1 or more, got {min(numbers)}"):
        measure(FakeModel(), "fake", *numbers)


def test_json_is_one_object_with_the_machine_and_the_trials(capsys):
    assert main(["bench", "--model", "tiny", "-p", "12", "-g", "4", "-n", "2", "--json"]) == 0
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {"chip", "cpu_cores", "memory_bytes", "os", "backend", "packages"} <= record["machine"].keys()
    assert record["machine"]["packages"]["mlx"] == mx.__version__
    (result,) = record["results"]
    assert (result["model"], result["prompt_tokens"], result["generation_tokens"]) == ("tiny", 12, 4)
    rates = {"prompt_tps", "generation_tps", "ttft_s", "prefill_peak_memory_bytes", "decode_peak_memory_bytes"}
    assert all(trial.keys() >= rates for trial in result["trials"])
    assert len(result["trials"]) == 2
    assert result["peak_memory_bytes"] >= result["weight_bytes"]
    assert min(result["prompt_tps"], result["generation_tps"], result["ttft_s"]) > 0


def test_the_table_fits_a_terminal_and_says_what_its_memory_is(capsys):
    assert main(["bench", "--model", "tiny", "-p", "12", "-g", "4", "-n", "1"]) == 0
    printed = capsys.readouterr()
    assert max(map(len, printed.out.splitlines())) <= 80
    for word in ("prefill", "decode", "tokens/s", "min - max", "MLX allocator", "EOS ignored", "first token after"):
        assert word in printed.out
    assert "\r" not in printed.err  # progress is for terminals


def test_lengths_that_shrank_are_named(capsys):
    assert main(["bench", "--model", "tiny", "-g", "2", "-p", "250", "-n", "1"]) == 0
    assert "context" not in capsys.readouterr().err
    assert main(["bench", "--model", "tiny", "-g", "2", "-n", "1"]) == 0
    assert "context is 256 tokens: 204 prompt tokens and 2 generated instead of 512 and 2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["-n", "0"], "expected a whole number of 1 or more, got '0'"),
        (["-p", "x"], "expected a whole number of 1 or more, got 'x'"),
        (["-p", "250", "-g", "7"], "250 prompt tokens and 7 generated exceed the model's context of 256"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_one_line(arguments, expected, capsys):
    try:
        status = main(["bench", "--model", "tiny", *arguments])
    except SystemExit as left:
        status = left.code
    assert status == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert expected in line


def test_declaring_the_flags_imports_nothing_heavy():
    code = "import sys, openelm_mlx.benchmarks.command; sys.exit('mlx.core' in sys.modules or 'rich' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
