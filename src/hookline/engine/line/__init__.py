"""The lifetime of a line: registration, attachments, handles, borders of compiled code."""
