"""`openelm bench`: what is timed, proved with a clock that only the model moves, and with real lazy work.

faults.md I5 (characters counted as tokens) cannot occur: `measure` deals in ids and never sees a text.
"""

import json
import time

import mlx.core as mx
import pytest
from fake_bench import PROMPT, FakeModel, run, side
from hypothesis import given
from hypothesis import strategies as st

from openelm_mlx.benchmarks.matrix import choose_lengths, precisions_of, shapes_for
from openelm_mlx.benchmarks.measure import Interrupted, measure, measure_in_turns, prompt_batch, prompt_ids
from openelm_mlx.benchmarks.session import MAX_WARM_UPS, Method, Shape
from openelm_mlx.errors import GenerationError


def test_the_warm_up_is_run_and_has_the_same_shape():
    """Faults I1, I2: a warm-up that never runs, or is smaller than what it warms up for."""
    model = FakeModel()
    result = run(model, trials=2)
    once = [(1, PROMPT)] + [(1, 1)] * 10
    assert model.shapes == once * (result.warm_ups + 2)
    assert (result.warm_ups, result.warm_up_stable) == (2, True)
    assert len(result.trials) == 2


def test_a_slow_first_run_is_not_in_the_result():
    """Fault I2."""
    result = run(FakeModel(slowness=(10.0, 1.0)))
    assert [trial.ttft_s for trial in result.trials] == pytest.approx([1.0, 1.0])
    assert result.generation_tps == pytest.approx(10.0)
    assert result.warm_ups == 3  # the second was faster than the first, so one more had to show that it stays so


def test_the_warm_up_is_bounded_and_says_when_it_was_not_enough():
    result = run(FakeModel(slowness=[0.5**n for n in range(20)]))
    assert (result.warm_ups, result.warm_up_stable) == (MAX_WARM_UPS, False)


def test_short_runs_warm_up_for_a_moment_longer():
    """Clocks take time to rise: 0.1 s a run is steady at once, and still five of them go first."""
    result = run(FakeModel(prefill_s=0.05, step_s=0.005))
    assert (result.warm_ups, result.warm_up_stable) == (5, True)


def test_the_first_token_belongs_to_prefill():
    """Fault I4: 1 s of prefill and 0.1 s a step make 8 and 10 tokens/s with 11 tokens, not 11."""
    result = run(FakeModel(prefill_s=1.0, step_s=0.1), generation_tokens=11)
    assert result.prompt_tps == pytest.approx(8.0)
    assert result.ttft_s == pytest.approx(1.0)
    assert result.generation_tps == pytest.approx(10.0)


@pytest.mark.parametrize("generated", [2, 5, 33])
def test_decode_is_all_tokens_but_the_first_over_the_time_they_took(generated):
    result = run(FakeModel(prefill_s=3.0, step_s=0.25), generation_tokens=generated)
    assert result.generation_tps == pytest.approx((generated - 1) / (0.25 * (generated - 1)))
    assert result.total_s == pytest.approx(3.0 + 0.25 * (generated - 1))


def test_end_to_end_does_not_hide_the_prompt():
    """Fault I9: 10 tokens/s while decoding are 5.5 for a person who waits a second for the first of eleven."""
    result = run(FakeModel(prefill_s=1.0, step_s=0.1), generation_tokens=11)
    assert result.end_to_end_tps == pytest.approx(11 / 2.0)
    record = result.to_dict()
    assert {"prompt_tps", "generation_tps", "ttft_s", "total_s", "end_to_end_tps"} <= record.keys()


def test_eos_is_ignored():
    """Fault I6: the fake wants EOS from the first token on."""
    model = FakeModel()
    result = run(model, generation_tokens=11, trials=1)
    assert len(model.shapes) == (result.warm_ups + 1) * 11


def test_one_token_has_no_decode_rate():
    result = run(FakeModel(), generation_tokens=1)
    assert result.prompt_tps == pytest.approx(8.0)
    assert result.generation_tps is None
    assert json.loads(json.dumps(result.to_dict()))["generation_tps"] is None


def test_a_clock_that_stands_still_gives_no_rate():
    result = run(FakeModel(), clock=lambda: 5.0)
    assert (result.prompt_tps, result.generation_tps, result.ttft_s, result.end_to_end_tps) == (None, None, 0.0, None)
    assert result.warm_ups == MAX_WARM_UPS
    json.dumps(result.to_dict(), allow_nan=False)


def test_trials_keep_their_order_and_the_summary_is_their_median():
    result = run(FakeModel(slowness=(1.0, 1.0, 1.0, 2.0, 4.0)), trials=3)
    assert [trial.generation_tps for trial in result.trials] == pytest.approx([10.0, 5.0, 2.5])
    assert result.generation_tps == pytest.approx(5.0)
    assert result.interval("prompt_tps") == pytest.approx((2.0, 8.0))


def test_heat_is_flagged():
    """Fault I8: trials of 100, 80 and 60 are told as such, in order, and their median is not quoted without it."""
    result = run(FakeModel(step_s=0.01, slowness=(1, 1, 1, 100 / 80, 100 / 60)), trials=3)
    assert result.values("generation_tps") == pytest.approx([100, 80, 60])
    assert result.drift()["generation_tps"] == pytest.approx(-0.4)
    assert result.to_dict()["drift"].keys() == {"generation_tps", "prompt_tps"}
    assert run(FakeModel(), trials=3).drift() == {}


def test_the_delay_comes_before_each_trial_and_no_warm_up():
    model, slept = FakeModel(), []
    result = run(model, trials=3, delay_s=2.5, sleep=lambda s: slept.append((s, len(model.prompts))))
    assert slept == [(2.5, 2), (2.5, 3), (2.5, 4)]
    assert len(result.trials) == 3


def test_several_sides_warm_up_first_and_then_take_turns_at_going_first():
    events = []
    results = measure_in_turns([side(FakeModel(), name, events) for name in "abc"])
    assert "".join(events) == "aabbcc" + "abc" + "bca" + "cab"
    assert [(result.variant, len(result.trials)) for result in results] == [("a", 3), ("b", 3), ("c", 3)]


def test_an_interrupted_measurement_keeps_the_finished_trials():
    told = []

    def progress(step):
        told.append(step)
        if "trial 3" in step:
            raise KeyboardInterrupt

    with pytest.raises(Interrupted) as stopped:
        run(FakeModel(), trials=5, progress=progress)
    (result,) = stopped.value.results
    assert len(result.trials) == 2
    assert told[0].endswith("warm-up 1")


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


def test_weights_that_wait_for_their_turn_are_not_this_models_memory():
    """Fault I10: of several precisions made of one read, the source is held beside each but the last."""
    beside = mx.zeros((4_000_000,))
    mx.eval(beside)
    shape = Shape(PROMPT, 3)
    peaks = [
        measure(model, "fake", shape, Method(1, clock=model.clock), foreign_bytes=foreign).peak_memory_bytes
        for model, foreign in ((FakeModel(), 0), (FakeModel(), beside.nbytes))
    ]
    assert peaks[0] - peaks[1] == pytest.approx(beside.nbytes, rel=0.01)


def test_the_prompt_is_the_same_every_time_and_inside_the_vocabulary():
    ids = prompt_ids(200, 50)
    assert ids == prompt_ids(200, 50)
    assert ids[:20] == prompt_ids(20, 50)
    assert set(ids) <= set(range(50))
    assert len(set(ids)) > 25


def test_each_text_of_a_batch_has_a_prompt_of_its_own():
    prompts = prompt_batch(Shape(20, 4, batch_size=3), 1000)
    assert [len(prompt) for prompt in prompts] == [20, 20, 20]
    assert len({tuple(prompt) for prompt in prompts}) == 3
    assert prompts[0] == prompt_ids(20, 1000)


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
    Shape(*chosen).check(context)
    assert chosen == (prompt or chosen[0], generation or chosen[1])
    assert chosen[0] <= max(512, prompt or 0)
    assert chosen[1] <= max(128, generation or 0)


def test_lists_make_every_combination_in_order():
    """Fault I9: several prompt lengths in one run."""
    shapes = shapes_for([16, 512, 1900], [8, 32], [1, 4], 2048)
    assert len(shapes) == len(set(shapes)) == 12
    assert shapes[:3] == [Shape(16, 8), Shape(16, 32), Shape(512, 8)]
    assert shapes[6] == Shape(16, 8, 4)
    with pytest.raises(GenerationError, match="1900 prompt tokens and 512 generated"):
        shapes_for([16, 1900], [8, 512], [1], 2048)


def test_dtypes_and_bits_make_precisions_and_nothing_is_the_models_own():
    assert [str(p) for p in precisions_of(["auto", "float16"], [4, 8])] == ["auto", "float16", "4-bit", "8-bit"]
    assert [str(p) for p in precisions_of(None, [4])] == ["4-bit"]
    assert [str(p) for p in precisions_of(None, None)] == ["auto"]


@pytest.mark.parametrize("numbers", [(0, 4, 1, 1), (4, 0, 1, 1), (4, 4, 0, 1), (4, 4, 1, 0), (-1, 4, 1, 1)])
def test_counts_below_one_are_refused(numbers):
    prompt, generation, trials, batch = numbers
    with pytest.raises(GenerationError, match=f"1 or more, got {min(numbers)}"):
        measure(FakeModel(), "fake", Shape(prompt, generation, batch), Method(trials))
