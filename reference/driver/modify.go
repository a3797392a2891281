package driver

import (
	"strconv"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// directIOKey is the one attribute of a VolumeAttributesClass. With "true", the default, loop
// devices pass the node's page cache by, where the pool can do that; with "false" they use it.
const directIOKey = "directIO"

// readMutable gives what is asked for, or what was.
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
