"""Texts on which tokenizers have gone wrong, shared by the tests of token ids."""

# What is read as control ids when a text is parsed instead of encoded (faults B6, B10).
SPECIAL_TEXTS = [
    "<s>Once upon a time",
    "tell me about </s> and <|user|>",
    "</s>",
    "<unk><s></s>",
    "a<s> b </s>c",
    "<0x41>",
]
TRICKY_TEXTS = [
    "",
    " ",
    "  ",
    "\n",
    "\n\n \n",
    " leading",
    "   three leading",
    "trailing ",
    "two  spaces   three",
    "tab\tand\r\nreturn",
    "once upon a time there was a cat",
    "It was 1883; 12345 pieces of eight, $0.50.",
    "don't \"quote\" 'em -- or -- do...",
    "CamelCase snake_case https://example.org/?q=a+b",
    "def f(x):\n    return x ** 2\n",
    "🙂é世",
    "🙂🙂 👩‍👩‍👧 🇫🇷",
    "e\u0301 differs from é",
    "ﬁ ½ Å ™ \u00a0 \u3000 \u200d",
    "Zürich, naïve, œuvre, Ελλάδα, мир, שלום, 日本語",
    "nul\x00inside",
    "\ufffd replacement",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "<|system|>\n<|user|>\n<|assistant|>\n",
]
# L. Frank Baum, The Wonderful Wizard of Oz (1900) and R. L. Stevenson, Treasure Island (1883): public domain.
PARAGRAPHS = [
    "When Aunt Em came there to live she was a young, pretty wife. The sun and wind had changed her, too. They had "
    "taken the sparkle from her eyes and left them a sober gray; they had taken the red from her cheeks and lips, and "
    "they were gray also. She was thin and gaunt, and never smiled now.",
    "Uncle Henry never laughed. He worked hard from morning till night and did not know what joy was. He was gray "
    "also, from his long beard to his rough boots, and he looked stern and solemn, and rarely spoke.",
    "28. IN THE ENEMY'S CAMP . . . . . . 168\n\n31. THE TREASURE-HUNT--FLINT'S POINTER . . . 189",
]
