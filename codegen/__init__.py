"""From a finished program to the files of its package."""

from partc.errors import InternalError

if __name__ != "partc.codegen":
    raise InternalError(f"import partc.codegen, not {__name__}")
