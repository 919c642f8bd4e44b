"""What tests of several folders use. Helpers of one folder are beside its tests."""
