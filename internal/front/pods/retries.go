package pods

import (
	"time"

	"k8s.io/apimachinery/pkg/util/cache"
	"k8s.io/client-go/util/flowcontrol"
)

// retries remembers what could not be learned, and delays the next attempt. The delay doubles with each
// attempt. What is not attempted again for twice the last delay is forgotten.
type retries struct {
	delays *flowcontrol.Backoff
	errors *cache.Expiring // until the next attempt is due
}

func newRetries(first, last time.Duration) retries {
	return retries{delays: flowcontrol.NewBackOff(first, last), errors: cache.NewExpiring()}
}

// recentError returns the error of the last attempt while the next one is not due, else nil.
func (r *retries) recentError(key string) error {
	known, _ := r.errors.Get(key)
	err, _ := known.(error)
	return err
}

// note records the outcome of an attempt. A success is forgotten.
func (r *retries) note(key string, err error) {
	r.delays.GC()
	if err == nil {
		r.delays.Reset(key)
		r.errors.Delete(key)
		return
	}
	r.delays.Next(key, time.Now())
	r.errors.Set(key, err, r.delays.Get(key))
}
