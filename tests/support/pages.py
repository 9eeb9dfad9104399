"""Reading a page as a browser does."""

import html.parser

VOID = {"meta", "br", "img", "hr", "input", "link", "path", "line", "rect", "circle"}


class Reader(html.parser.HTMLParser):
    """The elements of a page, their attributes and text; fails on tags that do not close."""

    def __init__(self, text: str):
        super().__init__()
        self.open, self.tags, self.attributes, self.words = [], [], [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag, tag

    def handle_data(self, data):
        self.words.append(data)
