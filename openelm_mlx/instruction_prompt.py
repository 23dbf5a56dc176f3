"""The prompt of the paper's commonsense data (LLM-Adapters): what stands before an answer in training and evaluation.

Source: CoreNet's commonsense_170k dataset. Its text is an indented literal, so that every line after the first begins
with 16 spaces and the first ends in one or two. All that belongs to the form an adapter was trained on.
"""

_INDENT = " " * 16
_TASK = "Below is an instruction that describes a task"
_ASKED = "Write a response that appropriately completes the request."


def instruction_prompt(instruction: str, context: str = "") -> str:
    """The text before the answer, down to the 16 spaces that the answer follows. `context` is the column "input"."""
    if context:
        opening = f"{_TASK}, paired with an input that provides further context. {_ASKED} "
        parts = [("Instruction", instruction), ("Input", context)]
    else:
        opening, parts = f"{_TASK}. {_ASKED}  ", [("Instruction", instruction)]
    blocks = [f"{_INDENT}### {title}:\n{_INDENT}{text}\n{_INDENT}\n" for title, text in parts]
    return f"{opening}\n\n{''.join(blocks)}{_INDENT}### Response:\n{_INDENT}"
