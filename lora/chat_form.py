"""Which form chat rows take, so that training meets the ids that `openelm chat` will send to the same model."""

from ..chat.format import ChatFormat
from ..chat.template import TemplateFormat, folder_template
from ..hub import resolve_model
from ..tokenizer import Tokenizer


def folder_format(model: str, tokenizer: Tokenizer, *, revision: str | None, offline: bool) -> ChatFormat | None:
    """The model folder's own chat template; None where there is none but ours, and the Instruct form is taken."""
    template = folder_template(resolve_model(model, revision=revision, offline=offline))
    return TemplateFormat(tokenizer, template, f"the chat template of {model}") if template else None
