"""Wire formats. ``chat.ChatView`` is the only thing the gate may see of a request."""
