"""The prompt that OpenELM-Instruct was trained on, from the template of CoreNet's instruction recipe.

    <s><|system|>
    </s>
    <|user|>
    Hello!</s>
    <|assistant|>

`<s>` and `</s>` are ids; `<|user|>` and its like are plain text. The training tokenizer encoded the text between two
ids as a text of its own (with SentencePiece's space in front), so the prompt is built from such segments. It
follows that what a user types, markers included, can never become a control id.
"""

from collections.abc import Mapping, Sequence

from .errors import GenerationError
from .tokenizer import BOS, EOS, Tokenizer

ROLES = ("system", "user", "assistant")

# The same prompt for readers of tokenizer_config.json (transformers, mlx-lm): they start without BOS.
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% if messages[0]['role'] != 'system' %}{{ '<|system|>\n' + eos_token + '\n' }}{% endif %}"
    "{% for m in messages %}"
    "{% if m['role'] in ['system', 'user', 'assistant'] %}"
    "{{ '<|' + m['role'] + '|>\n' + m['content'] + eos_token + '\n' }}"
    "{% else %}{{ raise_exception('role ' + m['role'] + ' is not one of system, user, assistant') }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)

Messages = Sequence[Mapping[str, str]]


def encode_chat(tokenizer: Tokenizer, messages: Messages, *, add_generation_prompt: bool = True) -> list[int]:
    """The ids of a conversation, BOS once; with `add_generation_prompt` the assistant speaks next.

    Raises GenerationError, naming the message, for a role or content that the prompt has no place for.
    """
    first, *rest = _segments(messages, add_generation_prompt)
    ids = tokenizer.encode(first)
    for segment in rest:
        ids += [tokenizer.eos_token_id, *tokenizer.encode_segment(segment)]
    return ids


def render_chat(messages: Messages, *, add_generation_prompt: bool = True) -> str:
    """The same as text to look at, with the ids spelled `<s>` and `</s>`. Never encode it: see the module's text."""
    return BOS + EOS.join(_segments(messages, add_generation_prompt))


def _segments(messages: Messages, add_generation_prompt: bool) -> list[str]:
    """The texts between the special ids: one for every turn, and what follows the last EOS."""
    _check(messages)
    turns = [(message["role"], message["content"]) for message in messages]
    if turns[0][0] != "system":
        turns.insert(0, ("system", ""))  # the recipe put an empty system turn before every training example
    headed = [f"<|{role}|>\n{content}" for role, content in turns]
    headed.append("<|assistant|>\n" if add_generation_prompt else "")
    return [headed[0], *("\n" + segment for segment in headed[1:])]


def _check(messages: Messages) -> None:
    if not messages:
        raise GenerationError("the chat has no messages; give at least one from the user")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise GenerationError(f"messages[{i}] is no object; expected a role and a content")
        role = message.get("role")
        if role not in ROLES:
            raise GenerationError(f"messages[{i}] has role {role!r}; OpenELM-Instruct knows {', '.join(ROLES)}")
        if role == "system" and i > 0:
            raise GenerationError(f"messages[{i}] is a system message; only the first message may be one")
        if not isinstance(message.get("content"), str):
            raise GenerationError(f"messages[{i}] has no text: its content must be a string")
