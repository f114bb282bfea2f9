"""Pictures of one step: who waits for whom, in lanes of time; and a collective's messages, step by step."""
