"""One stage, from mailbox to answer: receive and hand over, wait and decide, answer."""
