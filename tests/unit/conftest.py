from tests import properties

properties.load_profile()
