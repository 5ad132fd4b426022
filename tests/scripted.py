"""A model for chats whose replies are made up."""

from utils.settings.errors import UserError


class Scripted:
    """A model whose replies are functions of the last message; it remembers the conversations."""

    name = "scripted"
    has_one_turn = False

    def __init__(self, replies):
        self.replies, self.seen, self.changes = replies, [], []

    def reply(self, messages, show_text):
        self.seen.append([message["content"] for message in messages])
        return self.replies.get(messages[-1]["content"], lambda show: "yes")(show_text)

    def grade(self, messages, reply):
        return {"hostile": False, "3 7": True}.get(messages[-1]["content"])

    def change(self, name, value):
        if value == "hot":
            raise UserError("it is a number")
        self.changes.append((name, value))
