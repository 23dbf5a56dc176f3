"""A configuration that is broken or hostile ends in one ConfigError of one line, quickly, and nothing is executed."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import small_config

from openelm_mlx import __version__
from openelm_mlx.config import OpenELMConfig
from openelm_mlx.config_keys import counted
from openelm_mlx.errors import ConfigError

# JSON as a hostile or broken file may hold it, biased to the keys that matter.
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
KEYS = sorted(small_config())


class TestBadKeys:
    def test_one_error_lists_everything_missing(self):
        with pytest.raises(ConfigError) as caught:
            OpenELMConfig.from_dict({})
        message = str(caught.value)
        for key in (
            "model_dim",
            "head_dim",
            "num_transformer_layers",
            "vocab_size",
            "num_query_heads",
            "ffn_multipliers",
        ):
            assert f"{key} is missing" in message
        assert "\n" not in message

    def test_one_error_lists_everything_wrong(self):
        bad = {
            "model_dim": -1,
            "head_dim": 31,
            "ffn_with_glu": "yes",
            "rms_norm_eps": 0,
            "activation_fn_name": "gelu",
            "normalization_layer_name": "layer_norm",
            "num_kv_heads": [1, 2],
            "eos_token_id": 256,
        }
        with pytest.raises(ConfigError) as caught:
            OpenELMConfig.from_dict(small_config() | bad)
        assert [key for key in bad if key not in str(caught.value)] == []

    @pytest.mark.parametrize(
        "key", ["model_dim", "head_dim", "num_transformer_layers", "vocab_size", "ffn_dim_divisor"]
    )
    @pytest.mark.parametrize("value", [0, -4, 2.5, True, "8", None, [8], 2**31, 10**5000], ids=lambda v: str(type(v)))
    def test_a_size_is_a_positive_whole_number(self, key, value):
        raw = small_config() | {key: value}
        if key == "ffn_dim_divisor" and value is None:
            del raw[key]
            assert OpenELMConfig.from_dict(raw).ffn_dim_divisor == 256
            return
        with pytest.raises(ConfigError, match=key):
            OpenELMConfig.from_dict(raw)

    @pytest.mark.parametrize(
        ("changes", "complaint"),
        [
            ({"num_query_heads": 8}, "num_query_heads must be a list"),
            ({"num_query_heads": [2, 4, 4]}, "num_query_heads has 3 entries for 4 layers"),
            ({"num_kv_heads": [1, 3, 2, 2]}, "layer 1: 4 query heads cannot share 3 key/value heads"),
            ({"ffn_multipliers": [1.0, 2.0, 3.0]}, "ffn_multipliers must be a number, two bounds, or 4 numbers"),
            ({"ffn_multipliers": [1.0, float("nan")]}, "ffn_multipliers"),
            ({"num_transformer_layers": 5000}, "num_transformer_layers must be at most 1024"),
            ({"vocab_size": 2**30, "model_dim": 2**30}, "parameters; no OpenELM is that large"),
            ({"bos_token_id": 256}, "bos_token_id must be a token id below 256"),
        ],
    )
    def test_what_is_wrong_is_said(self, changes, complaint):
        with pytest.raises(ConfigError, match=complaint):
            OpenELMConfig.from_dict(small_config() | changes)

    def test_another_architecture_is_named_with_what_is_supported(self):
        # fault A16
        with pytest.raises(ConfigError) as caught:
            OpenELMConfig.from_dict({"model_type": "openelm2"}, where="model/config.json")
        assert str(caught.value) == (
            f"model/config.json: model_type 'openelm2' is not supported; openelm-mlx {__version__} reads 'openelm'"
        )

    @settings(max_examples=150)
    @given(st.dictionaries(st.sampled_from(KEYS), JSON), st.booleans())
    def test_arbitrary_json_gives_a_config_or_one_line(self, raw, whole):
        try:
            answer = OpenELMConfig.from_dict(small_config() | raw if whole else raw).__class__.__name__
        except ConfigError as error:
            answer = str(error)
        assert "\n" not in answer
        assert len(answer) < 1500

    @pytest.mark.parametrize(
        "text", ["", "{", "[1, 2]", "null", '"config"', "[" * 100_000, '{"model_dim": 1' + "0" * 5000 + "}", "\x00"]
    )
    def test_a_file_that_is_no_json_object(self, tmp_path, text):
        path = tmp_path / "config.json"
        path.write_text(text)
        with pytest.raises(ConfigError, match="config.json"):
            OpenELMConfig.from_file(path)

    def test_a_file_that_is_not_there_or_not_text(self, tmp_path):
        with pytest.raises(ConfigError, match="cannot read .*nowhere.json: No such file"):
            OpenELMConfig.from_file(tmp_path / "nowhere.json")
        (tmp_path / "bytes.json").write_bytes(b"\xff\xfe\x00")
        with pytest.raises(ConfigError, match=r"bytes.json is not valid JSON"):
            OpenELMConfig.from_file(tmp_path / "bytes.json")


def corenet_yaml(tmp_path, block: str):
    path = tmp_path / "openelm.yaml"
    path.write_text("model:\n  language_modeling:\n    name: general_gpt\n    general_gpt:\n" + block)
    return path


class TestCoreNetYaml:
    PUBLISHED = "      model_name: OpenELM-450M\n      vocab_size: 32128\n      max_context_length: 2048\n"
    CUSTOM = "      model_name: OpenELM-tiny\n      vocab_size: 4224\n      max_context_length: 256\n"

    def test_published_name_gives_the_published_size(self, tmp_path):
        config = OpenELMConfig.from_yaml(corenet_yaml(tmp_path, self.PUBLISHED))
        assert config == OpenELMConfig.from_name("450M", vocab_size=32128)
        assert config.num_parameters() == 457_375_744

    def test_custom_name_takes_its_widths_from_the_tensors(self, tmp_path):
        shapes = OpenELMConfig.from_dict(small_config()).parameter_shapes()
        config = OpenELMConfig.from_yaml(corenet_yaml(tmp_path, self.CUSTOM), shapes)
        assert config.parameter_shapes() == shapes
        assert (config.max_context_length, config.rope_max_length) == (256, 512)

    def test_custom_name_without_tensors(self, tmp_path):
        with pytest.raises(ConfigError, match="'OpenELM-tiny' is not a published OpenELM.*tensors"):
            OpenELMConfig.from_yaml(corenet_yaml(tmp_path, self.CUSTOM))

    @pytest.mark.parametrize("value", ["-5", "true", "'2048'", "[1]", "{}", "0x" + "f" * 4000], ids=lambda v: v[:8])
    @pytest.mark.parametrize("name", ["OpenELM-270M", "custom"])
    def test_a_bad_limit_is_named(self, tmp_path, name, value):
        block = f"      model_name: {name}\n      max_context_length: {value}\n"
        shapes = OpenELMConfig.from_dict(small_config()).parameter_shapes()
        with pytest.raises(ConfigError, match=r"openelm\.yaml.*max_context_length must be a positive whole number"):
            OpenELMConfig.from_yaml(corenet_yaml(tmp_path, block), shapes)

    @pytest.mark.parametrize(
        "text",
        [
            "",
            "model: 5",
            "model: {language_modeling: {}}",
            "a: [",
            "a: !!int ''",
            "a: !!timestamp x",
            "a: !!bool x",
            "a: 2001-99-99",
            "[" * 1000,
            "\x00",
        ],
    )
    def test_a_broken_file_is_one_line(self, tmp_path, text):
        path = tmp_path / "broken.yaml"
        path.write_text(text)
        with pytest.raises(ConfigError, match=r"broken\.yaml") as caught:
            OpenELMConfig.from_yaml(path)
        assert "\n" not in str(caught.value)

    def test_tags_are_never_executed(self, tmp_path):
        marker = tmp_path / "executed"
        block = f"      model_name: !!python/object/apply:os.mkdir ['{marker}']\n"
        with pytest.raises(ConfigError, match="not valid YAML"):
            OpenELMConfig.from_yaml(corenet_yaml(tmp_path, block))
        assert not marker.exists()

    def test_a_bomb_of_references_is_not_unfolded(self, tmp_path):
        doubling = "".join(f"x{i}: &x{i} [*x{i - 1}, *x{i - 1}]\n" for i in range(1, 60))
        path = tmp_path / "bomb.yaml"
        block = "model: {language_modeling: {general_gpt: {model_name: *x59}}}\n"
        path.write_text("x0: &x0 [1]\n" + doubling + block)
        with pytest.raises(ConfigError, match="is not a published OpenELM"):
            OpenELMConfig.from_yaml(path)


@pytest.mark.parametrize(("number", "said"), [(0, "0 tokens"), (1, "1 token"), (2, "2 tokens")])
def test_one_is_not_many(number, said):
    assert counted(number, "token") == said


def test_a_plural_of_its_own():
    assert [counted(n, "matrix", "matrices") for n in (1, 2)] == ["1 matrix", "2 matrices"]
