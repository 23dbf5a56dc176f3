"""Recipe, YAML file and flags become one record; what is misspelt or contradictory is told before any work."""

import argparse

import pytest

from openelm_mlx.config import PUBLISHED_SIZES, OpenELMConfig
from openelm_mlx.errors import ConfigError
from openelm_mlx.lora.arguments import add_arguments, size
from openelm_mlx.lora.job import prepare, total_iterations
from openelm_mlx.lora.optimizers import make_optimizer
from openelm_mlx.lora.schedule import make_schedule
from openelm_mlx.lora.settings import Settings
from openelm_mlx.lora.settings_sources import read_settings, recipe_names
from openelm_mlx.model import Model

# The keys of mlx-lm's example, with its values.
EXAMPLE = """
model: "mlx_model"
train: true
fine_tune_type: lora
optimizer: adamw
data: "some/dataset"
seed: 0
num_layers: 16
batch_size: 4
iters: 1000
val_batches: 25
learning_rate: 1e-5
steps_per_report: 10
steps_per_eval: 200
resume_adapter_file: null
adapter_path: "adapters"
save_every: 100
test: false
test_batches: 100
max_seq_length: 2048
grad_checkpoint: false
lora_parameters:
  keys: ["self_attn.q_proj", "self_attn.v_proj"]
  rank: 8
  scale: 20.0
  dropout: 0.0
lr_schedule:
  name: cosine_decay
  warmup: 100
  warmup_init: 1e-7
  arguments: [1e-5, 1000, 1e-7]
"""


def read(tmp_path, *flags, yaml=None, stored=None) -> Settings:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    if yaml is not None:
        (tmp_path / "config.yaml").write_text(yaml)
        flags = ("-c", str(tmp_path / "config.yaml"), *flags)
    return read_settings(parser.parse_args([str(flag) for flag in flags]), stored)


class TestSources:
    def test_flags_over_file_over_recipe_over_defaults(self, tmp_path):
        yaml = "data: rows\nlora_parameters: {rank: 4}\nbatch_size: 2\nepochs: 5\n"
        found = read(tmp_path, "--recipe", "laptop", "--batch-size", 1, "--iters", 7, "--dropout", 0.2, yaml=yaml)
        assert (found.data.data, found.batch_size, found.iters, found.epochs) == ("rows", 1, 7, None)
        assert found.lora_parameters == {"rank": 4, "alpha": 32, "dropout": 0.2}
        assert (found.optimizer, found.save_every) == ("adamw", 100)
        assert found.adapter_spec().scale == 8.0

    def test_mlx_lms_example_is_understood(self, tmp_path):
        found = read(tmp_path, yaml=EXAMPLE)
        assert (found.learning_rate, found.num_layers, found.optimizer, found.trains) == (1e-5, 16, "adamw", True)
        schedule = make_schedule(found.lr_schedule, found.learning_rate, 1000)
        assert [schedule(0), schedule(100), schedule(1100)] == pytest.approx([1e-7, 1e-5, 1e-7])

    def test_its_keys_are_of_another_model(self, tmp_path):
        # fault F10
        found = read(tmp_path, "--num-layers", -1, yaml=EXAMPLE)
        with pytest.raises(ConfigError, match=r"q_proj.*attn\.out_proj, attn\.qkv_proj, ffn\.proj_1, ffn\.proj_2"):
            prepare(Model(OpenELMConfig.from_name("270M")), found)

    def test_a_key_inside_lora_parameters_is_checked_too(self, tmp_path):
        found = read(tmp_path, yaml="data: rows\nlora_parameters: {rank: 4, scael: 2.0}\n")
        with pytest.raises(ConfigError, match="lora_parameters: unknown key 'scael'; known are rank, scale, alpha"):
            found.adapter_spec()
        with pytest.raises(ConfigError, match="rank is an entry of lora_parameters"):
            read(tmp_path, yaml="data: rows\nrank: 4\n")

    def test_the_home_folder_may_be_written_as_a_tilde(self, tmp_path, monkeypatch):
        monkeypatch.setenv("HOME", str(tmp_path))
        assert read(tmp_path, yaml="data: rows\nadapter_path: ~/mine\n").adapter_path == str(tmp_path / "mine")

    def test_a_misspelt_key_names_the_nearest(self, tmp_path):
        with pytest.raises(ConfigError, match="unknown key 'learning_rte'; did you mean learning_rate"):
            read(tmp_path, yaml="data: rows\nlearning_rte: 1e-4\n")

    @pytest.mark.parametrize(
        ("yaml", "match"),
        [
            ("data: [", "is no YAML"),
            ("- 1", "must hold keys and values"),
            ("data: rows\nbatch_size: four", "batch_size must be a whole number, got 'four'"),
            ("data: rows\nbatch_size: 0", "batch_size must be 1 or more"),
            ("data: rows\nlearning_rate: .nan", "learning_rate must be above 0"),
            ("data: rows\ntrain: 1", "train must be true or false"),
            ("data: rows\noptimizer: lion", "optimizer must be one of adam"),
            ("data: rows\nnum_layers: 0", "nothing would be trained"),
            ("data: rows\nlora_parameters: 3", "lora_parameters must be a mapping"),
            ("data: rows\nfine_tune_type: full\nembedding: input", "embedding input is an adapter's"),
            ("batch_size: 2", "no training data"),
        ],
    )
    def test_bad_values(self, tmp_path, yaml, match):
        with pytest.raises(ConfigError, match=match):
            read(tmp_path, yaml=yaml)

    def test_scale_or_alpha_never_both(self, tmp_path):
        assert read(tmp_path, "--data", "rows").adapter_spec().scale == 20.0
        assert read(tmp_path, "--data", "rows", "--alpha", 32, "--rank", 16).adapter_spec().scale == 2.0
        rslora = read(tmp_path, "--data", "rows", "--alpha", 32, "--rank", 16, "--rslora").adapter_spec()
        assert (rslora.scale, rslora.rslora) == (8.0, True)
        with pytest.raises(ConfigError, match="scale and alpha exclude each other"):
            read(tmp_path, "--data", "rows", "--alpha", 32, "--scale", 2).adapter_spec()

    def test_a_learning_rate_given_later_is_the_peak(self, tmp_path):
        found = read(tmp_path, "--learning-rate", 3e-4, yaml=EXAMPLE)
        assert make_schedule(found.lr_schedule, found.learning_rate, 1000)(100) == 3e-4

    def test_what_is_stored_comes_back(self, tmp_path):
        found = read(tmp_path, "--recipe", "apple-dora", "--data", "rows")
        assert read(tmp_path, stored=found.to_dict()) == found

    def test_iterations_are_whole_updates(self, tmp_path):
        asked = read(tmp_path, "--data", "rows", "--grad-accumulation-steps", 4, "--iters", 10)
        assert total_iterations(asked, 3) == 12
        epochs = read(tmp_path, "--data", "rows", "--epochs", 2.5)
        assert total_iterations(epochs, 10) == 25

    @pytest.mark.parametrize(("text", "count"), [("0", 0), ("500MB", 5 * 10**8), ("2g", 2 * 10**9), ("1.5 kB", 1500)])
    def test_sizes(self, text, count):
        assert size(text) == count


class TestRecipes:
    @pytest.mark.parametrize("name", recipe_names())
    @pytest.mark.parametrize("model_size", PUBLISHED_SIZES)
    def test_fits_every_size(self, tmp_path, name, model_size):
        found = read(tmp_path, "--recipe", name, "--data", "rows")
        make_optimizer(found.optimizer, found.optimizer_config, found.learning_rate)
        model = Model(OpenELMConfig.from_name(model_size))  # unevaluated: no memory
        layers = len(model.layers)
        spec = found.adapter_spec()
        assert (spec.num_layers, layers) == (-1, {"270M": 16, "450M": 20, "1_1B": 28, "3B": 36}[model_size])
        assert make_schedule(found.lr_schedule, found.learning_rate, 2000)(2000) == pytest.approx(
            found.learning_rate / 10
        )

    def test_apples_has_apples_numbers(self, tmp_path):
        found = read(tmp_path, "--recipe", "apple-lora", "--data", "rows")
        spec = found.adapter_spec()
        assert (spec.rank, spec.scale, spec.dropout, spec.input_embedding) == (32, 1.0, 0.1, True)
        assert (found.z_loss, found.clip_grad_norm, found.iters // found.grad_accumulation_steps) == (1e-4, 1.0, 4375)
        schedule = make_schedule(found.lr_schedule, found.learning_rate, 4375)
        assert [schedule(0), schedule(1000), schedule(4375)] == [1e-6, 3e-4, pytest.approx(3e-5)]
        model = Model(OpenELMConfig.from_name("270M"))
        _, targets = prepare(model, found)
        assert targets.trainable == 8_384_512 + 32 * (32000 + 1280)  # apple/corenet's count, with the Hub's vocabulary
        assert targets.adapted == "64 of 64 linear layers"
        assert targets.names[-1] == "transformer.token_embeddings (input only)"
        assert "transformer.layers.0-15.attn.qkv_proj" in targets.names


class TestSchedule:
    def test_the_peak_is_reached_exactly_and_the_end_not_passed(self):
        # fault F6
        schedule = make_schedule({"name": "cosine_decay", "warmup": 10, "arguments": [1e-3, None, 1e-5]}, 1.0, 20)
        rates = [schedule(update) for update in range(21)]
        assert rates[0] == 0
        assert rates[10] == 1e-3
        assert rates[:11] == sorted(rates[:11])
        assert rates[10:] == sorted(rates[10:], reverse=True)
        assert rates[19] >= 1e-5
        assert schedule(500) == rates[20] == pytest.approx(1e-5)

    @pytest.mark.parametrize(
        ("name", "arguments", "expected"),
        [
            ("constant", [0.5], [0.5, 0.5]),
            ("linear_schedule", [1.0, 0.0, 10], [1.0, 0.5]),
            ("linear_schedule", [1.0], [1.0, 0.75]),
            ("cosine_decay", [1.0, 10, 0.2], [1.0, 0.6]),
            ("exponential_decay", [1.0, 0.5], [1.0, 0.5**5]),
            ("step_decay", [1.0, 0.5, 2], [1.0, 0.25]),
        ],
    )
    def test_mlx_lms_names(self, name, arguments, expected):
        schedule = make_schedule({"name": name, "arguments": arguments}, 1.0, 20)
        assert [schedule(0), schedule(5)] == pytest.approx(expected)

    def test_a_share_of_the_run(self):
        schedule = make_schedule({"warmup": 0.25}, 0.4, 40)
        assert [schedule(5), schedule(10), schedule(39)] == pytest.approx([0.2, 0.4, 0.4])

    @pytest.mark.parametrize(
        ("settings", "match"),
        [
            ({"name": "triangle"}, "must be one of constant"),
            ({"name": "cosine_decay", "warm_up": 3}, "unknown key 'warm_up'"),
            ({"name": "cosine_decay", "arguments": [1, 2, 3, 4]}, "peak, updates, end.*got 4"),
            ({"name": "step_decay", "arguments": [1.0, 0.5]}, "size is missing"),
            ({"name": "cosine_decay", "arguments": [1.0, 0]}, "updates must be 1 or more"),
            ({"name": "constant", "arguments": "1e-4"}, "as numbers"),
            ({"warmup": -1}, "warmup must be"),
        ],
    )
    def test_refusals(self, settings, match):
        with pytest.raises(ConfigError, match=match):
            make_schedule(settings, 1e-3, 10)


def test_optimizer_options_are_checked():
    assert make_optimizer("adamw", {"adamw": {"betas": [0.9, 0.95]}}, 0.1).betas == [0.9, 0.95]
    assert make_optimizer("adafactor", {}, 0.1).relative_step is False
    with pytest.raises(ConfigError, match="adam has no option 'beta'; it has betas"):
        make_optimizer("adam", {"adam": {"beta": 1}}, 0.1)
    with pytest.raises(ConfigError, match="optimizer_config has 'adan'"):
        make_optimizer("adam", {"adan": {}}, 0.1)
