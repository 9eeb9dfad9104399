"""Rows of data and the files that hold them."""

import json


def json_lines(*rows):
    return "".join(json.dumps(r) + "\n" for r in rows).encode()


ROWS = [{"prompt": f"What is {i}? ", "completion": f"It is {'very ' * (i % 7)}{i}"} for i in range(40)]


def write(path, content):
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return str(path)


def jsonl(path, rows):
    return write(path, "".join(json.dumps(row) + "\n" for row in rows))


GOOD = b'{"text": "a"}\n'
