# What of libgradsync.so can be seen, and what it needs: nothing but gradsync_* and the C and C++
# run time, or it could clash with what else a trainer loads.
# cmake -DLIBRARY=<libgradsync.so> -DNM=<nm> -DREADELF=<readelf> -P surface_test.cmake
function(lines_of output)
  execute_process(COMMAND ${ARGN} OUTPUT_VARIABLE text COMMAND_ERROR_IS_FATAL ANY)
  string(REPLACE "\n" ";" lines "${text}")
  set(${output} "${lines}" PARENT_SCOPE)
endfunction()

set(exported 0)
lines_of(symbols ${NM} -D --defined-only ${LIBRARY})
foreach(line IN LISTS symbols)
  if(line MATCHES "^[0-9a-f]+ T gradsync_[a-z_]+@@GRADSYNC_0$")
    math(EXPR exported "${exported} + 1")
  elseif(NOT line MATCHES "^[0-9a-f]+ A GRADSYNC_0$" AND NOT line STREQUAL "")
    message(SEND_ERROR "exported, but not of the C ABI: ${line}")
  endif()
endforeach()
if(exported LESS 30)
  message(SEND_ERROR "only ${exported} functions are exported")
endif()

lines_of(needs ${READELF} -d ${LIBRARY})
foreach(line IN LISTS needs)
  if(line MATCHES "NEEDED.*\\[(.*)\\]" AND
     NOT CMAKE_MATCH_1 MATCHES "^(libc|libm|libstdc\\+\\+|libgcc_s|ld-linux-[a-z0-9_-]+)\\.so")
    message(SEND_ERROR "libgradsync.so needs ${CMAKE_MATCH_1}")
  endif()
  if(line MATCHES "RPATH|RUNPATH")
    message(SEND_ERROR "libgradsync.so looks for libraries in folders of its own: ${line}")
  endif()
endforeach()
