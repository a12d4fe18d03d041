"""The errors that bad input raises: one message each, with the mend where there is one."""


class ShardirError(Exception):
    """Something that the user wrote can't be done; the message says what, and the mend."""


class NotationError(ShardirError):
    """Text of an attribute that does not parse.

    `offset` counts characters from the start of the attribute's text.
    """

    def __init__(self, message: str, offset: int = 0):
        super().__init__(message)
        self.message, self.offset = message, offset
