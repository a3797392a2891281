package pods

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"strings"
	"time"

	"go.uber.org/zap"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

const (
	// mostPosts bounds the events that wait; more are dropped.
	mostPosts = 256
	// postPause is the time between two requests.
	postPause = 200 * time.Millisecond
	// mostName bounds the pod's name in the name of an event, which has at most 253 bytes.
	mostName = 253 - len(".") - 2*sumLen
	sumLen   = 8
)

// Event is something that a pod's user should know. An event that is posted again with another count
// replaces the one before.
type Event struct {
	Namespace, Pod, UID string
	Warning             bool
	Reason, Text        string
	Count               int32
	First, Last         time.Time
}

// Events posts events of pods, one after the other. Nobody waits for it.
type Events struct {
	server *server
	queue  chan Event
	pause  time.Duration
	log    *zap.Logger
}

// NewEvents returns what posts events to the API server that is asked for pods.
func NewEvents(c *Cluster) *Events {
	return &Events{server: c.server, queue: make(chan Event, mostPosts), pause: postPause, log: c.cfg.Log}
}

// Offer has an event posted, unless too many wait already.
func (e *Events) Offer(event Event) {
	select {
	case e.queue <- event:
	default:
	}
}

// Run posts until ctx ends. An event that cannot be posted is dropped.
func (e *Events) Run(ctx context.Context) error {
	failed := false
	for {
		select {
		case <-ctx.Done():
			return nil
		case event := <-e.queue:
			err := e.post(ctx, &event)
			if err != nil && !failed {
				e.log.Warn("events of pods cannot be posted: see cluster.events", zap.Error(e.server.explain(err)))
			}
			failed = err != nil
		}
		sys.Sleep(ctx, e.pause)
	}
}

func (e *Events) post(ctx context.Context, of *Event) error {
	client := e.server.client.Load()
	if client == nil {
		return volume.Errorf(volume.Timeout, "no API server was asked yet")
	}
	ctx, cancel := context.WithTimeout(ctx, getTime)
	defer cancel()
	sum := sha256.Sum256([]byte(of.UID + "\x00" + of.Reason + "\x00" + of.Text))
	kind := corev1.EventTypeNormal
	if of.Warning {
		kind = corev1.EventTypeWarning
	}
	event := &corev1.Event{
		ObjectMeta:     metav1.ObjectMeta{Namespace: of.Namespace, Name: strings.TrimRight(of.Pod[:min(len(of.Pod), mostName)], "-.") + "." + hex.EncodeToString(sum[:sumLen])},
		InvolvedObject: corev1.ObjectReference{APIVersion: "v1", Kind: "Pod", Namespace: of.Namespace, Name: of.Pod, UID: types.UID(of.UID)},
		Reason:         of.Reason, Message: of.Text, Type: kind, Count: of.Count,
		FirstTimestamp: metav1.NewTime(of.First), LastTimestamp: metav1.NewTime(of.Last),
		Source: corev1.EventSource{Component: "crust-proxy", Host: e.server.node}, ReportingController: "crust-proxy", ReportingInstance: e.server.node,
	}
	err := client.client.Post().MaxRetries(0).AbsPath(coreGroup).Namespace(of.Namespace).Resource("events").Body(event).Do(ctx).Error()
	if !apierrors.IsAlreadyExists(err) {
		return err
	}
	patch, err := json.Marshal(map[string]any{"count": event.Count, "lastTimestamp": event.LastTimestamp})
	if err != nil {
		return err
	}
	return client.client.Patch(types.MergePatchType).MaxRetries(0).AbsPath(coreGroup).Namespace(of.Namespace).Resource("events").
		Name(event.Name).Body(patch).Do(ctx).Error()
}
