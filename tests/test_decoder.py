"""Which decode step is taken: measured by a clock that only the steps move, remembered, never at a text's cost."""

import json
from importlib.metadata import version
from types import SimpleNamespace

import mlx.core as mx
import pytest
from caching import small_model

from openelm_mlx import decoder as decoder_module
from openelm_mlx import decoder_trials
from openelm_mlx.cache import KVCache
from openelm_mlx.caches import make_cache
from openelm_mlx.decoder import Decoder
from openelm_mlx.decoder_trials import Trial, TrialRecord, record_file, typical
from openelm_mlx.errors import GenerationError

ROOM = 200  # tokens that the caches of these tests have room for, of a block of 256
TRIAL = decoder_module._TRIAL_STEPS


@pytest.fixture(autouse=True)
def own_record(tmp_path, monkeypatch):
    """No test reads or writes the user's file."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("OPENELM_DECODER", raising=False)


class Machine:
    """A model and a compiled step that cost what they are told, on a clock that nothing else moves."""

    def __init__(self, monkeypatch, eager_s, compiled_s, compile_s, on_metal=True):
        self.eager_s, self.compiled_s, self.compile_s = eager_s, compiled_s, compile_s
        self.now, self.kinds = 0.0, ""  # an e or a c for each step
        self.cache = [KVCache()]
        monkeypatch.setattr(decoder_module, "CompiledDecoder", lambda model, cache: self.compile())
        monkeypatch.setattr(decoder_module, "can_compile", lambda model, cache: True)
        monkeypatch.setattr(decoder_module, "is_metal", lambda: on_metal)

    def parameters(self):
        return {"weight": mx.zeros((4,))}

    def __call__(self, tokens, cache, *, last_only):
        self.pass_by("e", self.eager_s)
        return mx.zeros((1, 1, 8))

    def compile(self):
        self.now += self.compile_s
        return SimpleNamespace(step=lambda token: self.pass_by("c", self.compiled_s))

    def pass_by(self, kind, seconds):
        self.now += seconds
        self.kinds += kind
        step = mx.zeros((1, 1, 1, 1))
        self.cache[0].update_and_fetch(step, step)

    def generate(self, tokens, mode="auto"):
        """Decode so many tokens with room for ROOM in the cache at first; what made them, as e and c."""
        self.cache[0] = KVCache()
        held = mx.zeros((1, 1, 256 - ROOM, 1))
        self.cache[0].update_and_fetch(held, held)
        self.kinds = ""
        decoder = Decoder(self, self.cache, tokens, mode, clock=lambda: self.now)
        for _ in range(tokens):
            decoder(mx.array([1]))
        self.said = str(decoder)
        return self.kinds


@pytest.mark.parametrize("compiled_s", [0.5, 2.0])
def test_three_trials_and_then_the_faster_one(monkeypatch, compiled_s):
    machine = Machine(monkeypatch, eager_s=1.0, compiled_s=compiled_s, compile_s=10.0)
    faster = "c" if compiled_s < 1 else "e"
    for _ in range(3):
        kinds = machine.generate(100)
        assert kinds[0] == "e"  # the first token waits for nothing
        assert kinds[1 : 1 + TRIAL].count("e") == kinds[1 : 1 + TRIAL].count("c") == TRIAL // 2
        assert set(kinds[1 + TRIAL :]) == {faster}
    assert machine.generate(100) == "e" + 99 * faster
    name = "compiled" if compiled_s < 1 else "eager"
    assert machine.said == f"{name} (1000.00 ms a token eager; {compiled_s * 1e3:.2f} ms compiled, after 10000 ms)"


def test_the_figures_are_those_of_the_steps(monkeypatch):
    machine = Machine(monkeypatch, eager_s=1.0, compiled_s=0.75, compile_s=4.0)
    machine.generate(100)
    assert TrialRecord(machine).trials(256) == [pytest.approx(Trial(1.0, 0.75, 4.0))]


@pytest.mark.parametrize(("tokens", "kind"), [(41, "e"), (42, "c")])
def test_compiling_is_paid_for_or_not_done(monkeypatch, tokens, kind):
    """10 s to compile and 0.25 s saved with a token: the first token is made anyway, 40 more do not win it back."""
    machine = Machine(monkeypatch, eager_s=1.0, compiled_s=0.75, compile_s=10.0)
    for _ in range(3):
        machine.generate(100)
    assert set(machine.generate(tokens)[1:]) == {kind}


def test_a_trial_has_paid_for_compiling(monkeypatch):
    machine = Machine(monkeypatch, eager_s=1.0, compiled_s=0.75, compile_s=10.0)
    assert machine.generate(1 + TRIAL + 3).endswith("ccc")


def test_a_short_text_is_never_a_trial(monkeypatch):
    machine = Machine(monkeypatch, eager_s=1.0, compiled_s=0.1, compile_s=1.0)
    assert machine.generate(TRIAL) == "e" * TRIAL
    assert machine.said == "eager"
    assert not record_file().exists()


def test_a_text_that_ends_early_leaves_no_trial(monkeypatch):
    machine = Machine(monkeypatch, eager_s=1.0, compiled_s=0.1, compile_s=1.0)
    decoder = Decoder(machine, machine.cache, 100, clock=lambda: machine.now)
    for _ in range(TRIAL):
        decoder(mx.array([1]))
    assert not record_file().exists()


def test_each_block_is_measured_for_itself(monkeypatch):
    machine = Machine(monkeypatch, eager_s=1.0, compiled_s=0.5, compile_s=0.0)
    kinds = machine.generate(ROOM + 100)
    assert kinds[ROOM] == "e"  # the step that enlarges the cache
    assert "e" in kinds[ROOM + 1 : ROOM + 1 + TRIAL]
    assert len(TrialRecord(machine).trials(256)) == len(TrialRecord(machine).trials(512)) == 1


def test_one_disturbed_trial_is_outvoted():
    assert typical([Trial(1.0, 0.5, 9.0), Trial(1.0, 9.0, 0.1), Trial(1.1, 0.6, 0.2)]) == Trial(1.0, 0.6, 0.2)


def test_a_cpu_is_measured_when_asked_and_what_was_measured_counts(monkeypatch):
    machine = Machine(monkeypatch, eager_s=1.0, compiled_s=0.5, compile_s=1.0, on_metal=False)
    assert set(machine.generate(100)) == {"e"}
    for _ in range(4):  # asked again, measured again
        assert "c" in machine.generate(100, "measure")[1 : 1 + TRIAL]
    assert len(TrialRecord(machine).trials(256)) == decoder_trials.ENOUGH_TRIALS
    assert set(machine.generate(100)[1:]) == {"c"}


@pytest.mark.parametrize("mode", ["eager", "compiled"])
def test_a_forced_step_measures_nothing(monkeypatch, mode):
    machine = Machine(monkeypatch, eager_s=1.0, compiled_s=0.5, compile_s=1.0)
    assert set(machine.generate(100, mode)) == {mode[0]}
    monkeypatch.setenv("OPENELM_DECODER", mode)
    assert set(machine.generate(100, None)) == {mode[0]}
    assert machine.said == mode
    assert not record_file().exists()


def test_an_unknown_mode_is_refused():
    with pytest.raises(GenerationError, match="one of auto, eager, compiled, measure; got 'fast'"):
        Decoder(small_model(), [], 1, "fast")


@pytest.mark.parametrize("kind", [{"max_kv_size": 8}, {"kv_bits": 8}])
def test_what_cannot_be_compiled_is_not(kind):
    model = small_model()
    cache = make_cache(model, **kind)
    decoder = Decoder(model, cache, 9, "compiled")
    logits = [decoder(mx.array([token]))[0] for token in range(1, 10)]
    assert str(decoder) == "eager"
    plain = make_cache(model, **kind)
    expected = [model(mx.array([[token]]), plain, last_only=True)[0, 0] for token in range(1, 10)]
    assert mx.abs(mx.stack(logits) - mx.stack(expected)).max().item() < 1e-5


def test_a_trial_does_not_change_a_token(monkeypatch):
    """Eager, compiled, and both in turn: the same greedy text in float32."""
    monkeypatch.setattr(KVCache, "block", 64)
    model = small_model()

    def text(mode):
        cache = model.make_cache()
        token = model(mx.array([[3, 9, 4]]), cache, last_only=True)[:, -1].argmax(-1)
        decoder, ids = Decoder(model, cache, 50, mode), []
        for _ in range(50):
            ids.append(token.item())
            token = decoder(token).argmax(-1)
        return ids

    assert text("eager") == text("measure") == text("compiled")
    assert len(TrialRecord(model).trials(64)) == 1


def test_models_are_told_apart_by_their_shapes_and_dtypes():
    one, same, other = small_model(), small_model(seed=2), small_model()
    other.set_dtype(mx.float16)
    TrialRecord(one).add(256, Trial(1, 2, 3))
    assert TrialRecord(same).trials(256) == [Trial(1, 2, 3)]
    assert TrialRecord(other).trials(256) == TrialRecord(one).trials(512) == []


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe",
        b"[]",
        b"{}",
        b'{"mlx": "VERSION"}',
        b'{"mlx": "VERSION", "trials": 3}',
        b'{"mlx": "VERSION", "trials": {"KEY": [[1, 2]]}}',
        b'{"mlx": "VERSION", "trials": {"KEY": [[1, 2, "x"]]}}',
        b'{"mlx": "VERSION", "trials": {"KEY": [[1, 2, NaN]]}}',
        b'{"mlx": "VERSION", "trials": {"KEY": [[1, 2, 1e999]]}}',
        b'{"mlx": "VERSION", "trials": {"KEY": 1}}',
        b"[" * 100_000,
    ],
)
def test_a_damaged_record_is_no_record(content):
    model = small_model()
    record_file().parent.mkdir()
    key = TrialRecord(model)._key(256).encode()
    record_file().write_bytes(content.replace(b"VERSION", version("mlx").encode()).replace(b"KEY", key))
    assert TrialRecord(model).trials(256) == []
    assert TrialRecord(model).add(256, Trial(1, 2, 3)) == TrialRecord(model).trials(256) == [Trial(1, 2, 3)]
    assert [path.name for path in record_file().parent.iterdir()] == ["decoders.json"]


def test_another_mlx_begins_anew():
    model = small_model()
    TrialRecord(model).add(256, Trial(1, 2, 3))
    stored = json.loads(record_file().read_text())
    record_file().write_text(json.dumps(stored | {"mlx": "0.1"}))
    assert TrialRecord(model).trials(256) == []


def test_a_place_that_cannot_be_written_only_forgets(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    record = TrialRecord(small_model())
    assert record.add(256, Trial(1, 2, 3)) == [Trial(1, 2, 3)]
    assert record.trials(256) == []


@pytest.mark.parametrize("given", ["", "relative/path"])
def test_the_record_is_in_the_users_cache_folder(monkeypatch, tmp_path, given):
    assert record_file() == tmp_path / "openelm" / "decoders.json"
    monkeypatch.setenv("XDG_CACHE_HOME", given)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert record_file() == tmp_path / "home" / ".cache" / "openelm" / "decoders.json"
