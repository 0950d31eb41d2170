"""A reward of one's own: short answers that hold the expected word. Called once per group, in a process of its own."""


def score(prompts: list[list[dict[str, str]]], completions: list[str], answer: list[str]) -> list[float]:
    """Return one reward per completion; `answer` is the dataset's column of that name, once per completion."""
    pairs = zip(completions, answer, strict=True)
    return [float(word.lower() in text.lower()) / (1 + len(text.split()) / 10) for text, word in pairs]
