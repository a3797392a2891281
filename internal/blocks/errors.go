package blocks

import "fmt"

// ServerError is something that a server sent and CSI does not allow.
type ServerError struct{ text string }

func (e *ServerError) Error() string { return "the server broke the protocol: " + e.text }

func wrong(format string, args ...any) error {
	return &ServerError{fmt.Sprintf(format, args...)}
}
