"""An server with OpenAI's and Anthropic's APIs in front of the sampler."""
