package driver

import (
	"context"
	"path"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promauto"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
)

// metrics are the metrics of the streams of changed and allocated blocks.
type metrics struct {
	registry  *prometheus.Registry
	underWay  *prometheus.GaugeVec
	ended     *prometheus.CounterVec
	durations *prometheus.HistogramVec
	bytes     *prometheus.CounterVec
}

// streamBuckets range from the listing of extents to the comparison of a whole disk.
var streamBuckets = []float64{.001, .01, .1, 1, 10, 60, 600, 3600}

func newMetrics() *metrics {
	registry := prometheus.NewRegistry()
	registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	auto := promauto.With(registry)
	return &metrics{
		registry: registry,
		underWay: auto.NewGaugeVec(prometheus.GaugeOpts{
			Name: "crust_driver_metadata_streams", Help: "Streams of allocated and changed blocks under way.",
		}, []string{"method"}),
		ended: auto.NewCounterVec(prometheus.CounterOpts{
			Name: "crust_driver_metadata_streams_total", Help: "Streams that have ended, by gRPC code.",
		}, []string{"method", "code"}),
		durations: auto.NewHistogramVec(prometheus.HistogramOpts{
			Name: "crust_driver_metadata_stream_duration_seconds", Help: "Time that streams took.", Buckets: streamBuckets,
		}, []string{"method"}),
		bytes: auto.NewCounterVec(prometheus.CounterOpts{
			Name: "crust_driver_metadata_bytes_total", Help: "Bytes of the blocks that streams have named.",
		}, []string{"method"}),
	}
}

// begin counts a stream that begins. The caller calls end with its code.
func (m *metrics) begin(fullMethod string) (end func(codes.Code)) {
	method, began := path.Base(fullMethod), time.Now()
	m.underWay.WithLabelValues(method).Inc()
	return func(code codes.Code) {
		m.underWay.WithLabelValues(method).Dec()
		m.ended.WithLabelValues(method, code.String()).Inc()
		m.durations.WithLabelValues(method).Observe(time.Since(began).Seconds())
	}
}

// named counts the bytes of the blocks that a stream has named.
func (m *metrics) named(stream context.Context, bytes int64) {
	fullMethod, _ := grpc.Method(stream)
	m.bytes.WithLabelValues(path.Base(fullMethod)).Add(float64(bytes))
}
