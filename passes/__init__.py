"""The passes, one file each, in the order in which they run."""

from partc.errors import InternalError

if __name__ != "partc.passes":
    raise InternalError(f"import partc.passes, not {__name__}")
