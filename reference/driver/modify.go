package driver

import (
	"strconv"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// directIOKey is the only attribute of a VolumeAttributesClass. With "true", the default, loop
// devices bypass the node's page cache if the data directory allows that; with "false" they
// use it.
const directIOKey = "directIO"

// readMutable returns whether loop devices are to use the page cache: as the parameters say,
// else as before.
func readMutable(parameters map[string]string, buffered bool) (bool, error) {
	for key, value := range parameters {
		if key != directIOKey {
			return false, status.Errorf(codes.InvalidArgument, "mutable_parameters: %q is not known; there is %s", key, directIOKey)
		}
		direct, err := strconv.ParseBool(value)
		if err != nil {
			return false, status.Errorf(codes.InvalidArgument, "mutable_parameters: %s is %q, and must be true or false", key, value)
		}
		buffered = !direct
	}
	return buffered, nil
}
