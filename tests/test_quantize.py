"""Quantisation settings: what is valid, what a model's plan is, and that config.json and the tensors tell it again."""

import json

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from reference import small_config

from openelm_mlx.config import OpenELMConfig
from openelm_mlx.errors import CheckpointError, ConfigError
from openelm_mlx.model import Model
from openelm_mlx.quantize import (
    AFFINE_BITS,
    AFFINE_GROUP_SIZES,
    MODES,
    Quantization,
    QuantizationSettings,
    detect,
    logical_shapes,
    matrices,
    plan,
)
from openelm_mlx.tensors import StoredTensor

EMBEDDING = "transformer.token_embeddings"
EVERY_SETTING = [
    *(QuantizationSettings.of("affine", bits, group) for bits in AFFINE_BITS for group in AFFINE_GROUP_SIZES),
    *(QuantizationSettings.of(mode) for mode in MODES),
]


def config(**changes) -> OpenELMConfig:
    return OpenELMConfig.from_dict(small_config(**changes))


def quantized_tensors(model_config: OpenELMConfig, quantization: Quantization) -> dict[str, StoredTensor]:
    """The tensors of such a model: names, dtypes and shapes; nobody reads their values."""
    tensors = {}
    for name, shape in model_config.parameter_shapes().items():
        settings = quantization.modules.get(name.removesuffix(".weight"))
        parts = settings.packed(shape, "BF16") if settings else {"weight": ("BF16", shape)}
        for suffix, (dtype, part_shape) in parts.items():
            part = f"{name.removesuffix('weight')}{suffix}"
            tensors[part] = StoredTensor(part, dtype, part_shape, lambda start, stop: np.empty(0))
    return tensors


@pytest.fixture
def four_bits() -> tuple[OpenELMConfig, Quantization, dict[str, StoredTensor]]:
    quantization = plan(config(), QuantizationSettings.of())
    return config(), quantization, quantized_tensors(config(), quantization)


class TestSettings:
    @pytest.mark.parametrize(
        ("mode", "bits", "group_size"), [("affine", 4, 64), ("mxfp4", 4, 32), ("mxfp8", 8, 32), ("nvfp4", 4, 16)]
    )
    def test_defaults_are_mlx_lms(self, mode, bits, group_size):
        assert QuantizationSettings.of(mode) == QuantizationSettings(bits, group_size, mode)

    @pytest.mark.parametrize("settings", EVERY_SETTING, ids=str)
    def test_shapes_are_what_mlx_makes(self, settings):
        weight = mx.random.normal((6, 256)).astype(mx.bfloat16)
        made = mx.quantize(weight, **settings.to_dict())
        expected = settings.packed((6, 256), "BF16").values()
        names = {"U32": mx.uint32, "BF16": mx.bfloat16, "U8": mx.uint8}
        assert [(part.dtype, part.shape) for part in made] == [(names[dtype], shape) for dtype, shape in expected]

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (("int4",), "mode 'int4' is unknown; valid modes: affine, mxfp4, mxfp8, nvfp4"),
            (("affine", 7), "2, 3, 4, 5, 6 or 8 bits in groups of 32, 64 or 128"),
            (("affine", 4, 48), "2, 3, 4, 5, 6 or 8 bits in groups of 32, 64 or 128"),
            (("affine", 0), "2, 3, 4, 5, 6 or 8"),
            (("mxfp4", 8), "mode mxfp4 always has 4 bits in groups of 32"),
            (("nvfp4", None, 32), "mode nvfp4 always has 4 bits in groups of 16"),
        ],
    )
    def test_an_error_says_what_is_valid(self, arguments, message):
        with pytest.raises(ConfigError, match=message):
            QuantizationSettings.of(*arguments)


class TestPlan:
    def test_the_embedding_keeps_eight_bits(self):  # fault C11
        made = plan(config(), QuantizationSettings.of(bits=2))
        assert made.modules[EMBEDDING] == QuantizationSettings(8, 64)
        assert {s for path, s in made.modules.items() if path != EMBEDDING} == {QuantizationSettings(2, 64)}
        assert set(made.modules) == set(matrices(config()))

    def test_the_embedding_stays_affine_in_other_modes(self):
        assert plan(config(), QuantizationSettings.of("mxfp4")).modules[EMBEDDING] == QuantizationSettings(8, 64)

    def test_an_untied_head_is_an_embedding(self):
        made = plan(config(share_input_output_layers=False), QuantizationSettings.of())
        assert made.modules["lm_head"] == made.modules[EMBEDDING] == QuantizationSettings(8, 64)

    def test_sixteen_bits_leave_the_embedding_alone(self):
        made = plan(config(), QuantizationSettings.of(), embedding_bits=16)
        assert EMBEDDING not in made.modules
        assert made.skipped == (EMBEDDING,)
        assert made.to_config()[EMBEDDING] is False

    def test_what_no_group_divides_is_left_and_recorded(self):  # fault C8
        odd = config(model_dim=96, head_dim=32)
        made = plan(odd, QuantizationSettings.of())
        assert {path for path, shape in matrices(odd).items() if shape[1] % 64} == set(made.skipped) != set()
        assert all(made.to_config()[path] is False for path in made.skipped)

    def test_norms_are_never_packed(self):
        assert not any("norm" in path for path in matrices(config()))


class TestMixed:
    """The recipe: two bits more for the embedding, the first and last layers, and the narrow ones."""

    @pytest.mark.parametrize(
        ("name", "narrow", "last"), [("270M", 4, 15), ("450M", 5, 19), ("1.1B", 6, 27), ("3B", 8, 35)]
    )
    def test_of_the_published_sizes(self, name, narrow, last):
        published = OpenELMConfig.from_name(name)
        made = plan(published, QuantizationSettings.of(), recipe="mixed")
        raised = {path.split(".")[2] for path, s in made.modules.items() if s.bits == 6 and ".layers." in path}
        assert raised == {*map(str, range(narrow)), str(last)}
        assert made.modules[EMBEDDING].bits == 6
        share = {bits: sum(1 for s in made.modules.values() if s.bits == bits) for bits in (4, 6)}
        assert share[4] > share[6]

    def test_bits_are_recorded_where_they_differ(self):
        made = plan(config(), QuantizationSettings.of(bits=3), recipe="mixed")
        entry = made.to_config()
        assert entry["bits"] == 3
        assert entry["transformer.layers.0.attn.qkv_proj"] == {"group_size": 64, "bits": 5, "mode": "affine"}
        assert "transformer.layers.2.attn.qkv_proj" not in entry
        assert detect(quantized_tensors(config(), made), {"quantization": entry}, config(), "here") == made

    def test_the_embedding_is_the_users_to_choose(self):
        made = plan(config(), QuantizationSettings.of(), 16, "mixed")
        assert made.skipped == (EMBEDDING,)

    @pytest.mark.parametrize(
        ("settings", "recipe", "message"),
        [
            (("affine", 8), "mixed", "8 are the most there are"),
            (("mxfp4",), "mixed", "needs --q-mode affine"),
            (("affine",), "mixed_4_6", "valid recipes: uniform, mixed"),
        ],
    )
    def test_what_it_cannot_do(self, settings, recipe, message):
        with pytest.raises(ConfigError, match=message):
            plan(config(), QuantizationSettings.of(*settings), recipe=recipe)


class TestRoundTrip:
    @pytest.mark.parametrize("embedding_bits", [4, 8, 16])
    @pytest.mark.parametrize("settings", [s for s in EVERY_SETTING if s.group_size < 128], ids=str)
    def test_config_and_tensors_give_the_plan_back(self, settings, embedding_bits):
        made = plan(config(), settings, embedding_bits)
        tensors = quantized_tensors(config(), made)
        raw = {"quantization": json.loads(json.dumps(made.to_config()))}
        assert detect(tensors, raw, config(), "here") == made
        assert logical_shapes(tensors, made, config()) == config().parameter_shapes()

    def test_modules_that_config_does_not_name_are_known_by_their_shapes(self, four_bits):
        """mlx-lm's older folders hold only the common settings."""
        model_config, made, tensors = four_bits
        entry = {"group_size": 64, "bits": 4}
        assert detect(tensors, {"quantization": entry}, model_config, "here") == made
        assert detect(tensors, {"quantization_config": entry}, model_config, "here") == made

    def test_mlx_builds_the_modules(self, four_bits):  # fault A12: the embedding, as lookup and as head
        model_config, made, _ = four_bits
        model = Model(model_config)
        nn.quantize(model, class_predicate=made.parameters_of)
        assert isinstance(model.transformer.token_embeddings, nn.QuantizedEmbedding)
        assert model.transformer.token_embeddings.bits == 8
        assert model.layers[0].ffn.proj_1.bits == 4
        assert mx.all(mx.isfinite(model(mx.array([[1, 2]])))).item()

    def test_an_unquantized_model_has_none(self):
        plain = quantized_tensors(config(), Quantization(QuantizationSettings(), {}))
        assert detect(plain, {}, config(), "here") is None
        assert logical_shapes(plain, None, config()) == config().parameter_shapes()


class TestContradictions:
    def test_config_does_not_say_so(self, four_bits):  # fault A14
        with pytest.raises(CheckpointError, match="weights are quantized, config.json does not say so"):
            detect(four_bits[2], {}, four_bits[0], "here")

    def test_tensors_do_not_show_it(self):
        plain = quantized_tensors(config(), Quantization(QuantizationSettings(), {}))
        with pytest.raises(CheckpointError, match="says the weights are quantized, but no tensor is"):
            detect(plain, {"quantization": {"bits": 4, "group_size": 64}}, config(), "here")

    @pytest.mark.parametrize(
        ("entry", "message"),
        [
            ({"bits": None, "group_size": 64}, '"quantization" has bits None, expected a whole number'),  # fault C10
            ({"bits": 4}, "group_size None"),
            ({"bits": 4, "group_size": 64, "mode": "awq"}, "mode 'awq' is unknown"),
            ({"quant_method": "gptq"}, "quantized by 'gptq', expected MLX's own"),
            (["4"], "must hold settings"),
            ({"bits": 4, "group_size": 64, EMBEDDING: {"bits": 4}}, "says .*token_embeddings is affine, 4 bits"),
            ({"bits": 4, "group_size": 64, EMBEDDING: False}, "token_embeddings is quantized, but config.json says"),
            ({"bits": 4, "group_size": 64, EMBEDDING: "yes"}, "expected settings, true or false"),
        ],
    )
    def test_a_wrong_entry(self, four_bits, entry, message):
        with pytest.raises((CheckpointError, ConfigError), match=message):
            detect(four_bits[2], {"quantization": entry}, four_bits[0], "here")

    @pytest.mark.parametrize("part", ["weight", "biases"])
    def test_parts_that_do_not_belong_together(self, four_bits, part):
        model_config, _, tensors = four_bits
        name = f"transformer.layers.0.ffn.proj_1.{part}"
        spoilt = tensors | {name: StoredTensor(name, tensors[name].dtype, (3, 3), tensors[name].read_rows)}
        for damaged in (spoilt, {key: value for key, value in tensors.items() if key != name}):
            with pytest.raises(CheckpointError, match="proj_1 is not quantized in any way known here"):
                detect(damaged, {"quantization": {"bits": 4, "group_size": 64}}, model_config, "here")
