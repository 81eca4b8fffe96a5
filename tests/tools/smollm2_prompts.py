"""The twenty prompts of the SmolLM2 goldens: plain text, or the messages of a chat."""

from __future__ import annotations

Message = dict[str, str]

TEXTS: dict[str, str] = {
    "one_word": "Once",
    "capital": "The capital of France is",
    "story": "Once upon a time, in a village by the sea, there lived an old lighthouse keeper who",
    "list": "Ingredients for a simple tomato soup:\n- 4 ripe tomatoes\n- 1 onion\n-",
    "numbers": "Numbers: 7, 42, 1234567890, 3.14159, -0.001, 2026-11-21 04:20, 0x1F, 99%. The next number is",
    "arithmetic": "12 + 30 = 42\n105 - 5 = 100\n9 * 9 = 81\n144 / 12 =",
    "python": 'def fibonacci(n: int) -> int:\n    """The n-th Fibonacci number."""\n    if n < 2:\n        return n\n',
    "javascript": "// Debounce a function\nfunction debounce(callback, waitMs) {\n\tlet timer = null;\n\treturn (...args) => {\n",
    "sql": "-- Customers who ordered more than twice\nSELECT c.name, COUNT(o.id) AS orders\nFROM customers AS c\n",
    "accents": "Le café « L'Étoile » à Zürich sert des crêpes à 7,50 € ; garçon, s'il vous plaît,",
    "cjk": "日本の首都は東京です。中国的首都是北京。대한민국의 수도는",
    "emoji": "Weather report: ☀️ on Monday, 🌧️ on Tuesday, 👩‍👩‍👧‍👦 picnic on Sunday 🎉🎉. My favourite emoji is",
    "cyrillic_arabic": "Москва — столица России. القاهرة هي عاصمة مصر. Αθήνα είναι η πρωτεύουσα της",
    "whitespace": "  Column A\t\tColumn B\r\n\r\n\n   1\t\t   one\r\n   2\t\t   two\r\n",
}

CHATS: dict[str, list[Message]] = {
    "chat_hello": [{"role": "user", "content": "Hello! Who are you?"}],
    "chat_system": [
        {"role": "system", "content": "You answer in exactly one short sentence."},
        {"role": "user", "content": "Why is the sky blue?"},
    ],
    "chat_turns": [
        {"role": "user", "content": "Name a fruit that is yellow."},
        {"role": "assistant", "content": "A banana is yellow."},
        {"role": "user", "content": "And one that is red?"},
        {"role": "assistant", "content": "A strawberry is red."},
        {"role": "user", "content": "Which of the two is sweeter, and why?"},
    ],
    "chat_code": [
        {"role": "system", "content": "You are a careful programmer."},
        {"role": "user", "content": "Write a Python function that reverses the words of a sentence."},
        {"role": "assistant", "content": "def reverse_words(text):\n    return ' '.join(text.split()[::-1])"},
        {"role": "user", "content": "Now make it keep the punctuation at the end. 🙂"},
    ],
    "chat_unicode": [{"role": "user", "content": "Übersetze ins Englische: „Grüße aus 東京, 3°C und Schnee ❄️“"}],
}


def long_text() -> str:
    """About 1,500 tokens of a ship's log that never says the same thing twice."""
    winds = ("north", "north-east", "east", "south-east", "south", "south-west", "west", "north-west")
    seas = ("calm", "slight", "moderate", "rough", "confused", "long and low")
    works = ("mended the foresail", "took on water", "sounded the channel", "painted the rail", "caught two tuna")
    sights = ("a pod of dolphins", "a far light", "nothing but sky", "a brig under topsails", "drifting weed")
    lines = ["The log of the schooner Meridian, kept by her mate.\n"]
    for day in range(1, 43):
        wind, sea = winds[day * 3 % len(winds)], seas[day * 5 % len(seas)]
        work, sight = works[day * 2 % len(works)], sights[day * 4 % len(sights)]
        knots, miles = 3 + day * 7 % 11, 60 + day * 37 % 140
        lines.append(
            f"Day {day}. Wind {wind} at {knots} knots, sea {sea}. We {work} and saw {sight}; {miles} miles made good."
        )
    return "\n".join(lines) + "\nDay 43. Wind"
