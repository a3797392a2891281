package blocks

import (
	"errors"
	"fmt"
)

// ServerError is something that a server sent and CSI does not allow.
type ServerError struct{ text string }

func (e *ServerError) Error() string { return "the server broke the protocol: " + e.text }

func wrong(format string, args ...any) error {
	return &ServerError{fmt.Sprintf(format, args...)}
}

var errNoCA = errors.New("the SnapshotMetadataService has no certificate in caCert that can be read")

func notReady(namespace, name string) error {
	return fmt.Errorf("VolumeSnapshot %s/%s is not ready: see 'kubectl -n %s describe volumesnapshot %s'", namespace, name, namespace, name)
}
