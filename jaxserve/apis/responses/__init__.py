"""What stands behind `/v1/responses`: from items to a chat, from its reply to items and events, and what is kept."""
