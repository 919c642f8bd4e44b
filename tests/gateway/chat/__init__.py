"""Tests of chats: templates' inputs, tools, parsers."""
