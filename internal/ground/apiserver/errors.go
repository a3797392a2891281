package apiserver

import (
	"fmt"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
)

// Explain turns an error of the API server at host, or of the connection to it, into a
// sentence. node is the name that was asked about.
func Explain(err error, host, node string) error {
	switch {
	case apierrors.IsForbidden(err):
		return fmt.Errorf("the API server does not allow it (is %q this node's name in the cluster?): %w", node, Clipped(err))
	case apierrors.IsUnauthorized(err):
		return fmt.Errorf("the API server %s does not take our identity: %w", host, Clipped(err))
	case apierrors.ReasonForError(err) != metav1.StatusReasonUnknown:
		return fmt.Errorf("the API server %s answers: %w", host, Clipped(err))
	default:
		return fmt.Errorf("the API server %s cannot be reached: %w", host, Clipped(err))
	}
}

// clippedError is an error whose text is bounded: it may quote what others wrote.
type clippedError struct {
	error
	text string
}

func (e clippedError) Error() string { return e.text }
func (e clippedError) Unwrap() error { return e.error }

// Clipped bounds the text of an error.
func Clipped(err error) error { return clippedError{error: err, text: sys.ClipTo(err.Error(), 300)} }
